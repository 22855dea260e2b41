"""Tensors that a method asks its neighbours for outside of a round, as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket


class NeighborTensors:
    """Tensors from the in-neighbours for one that goes to the out-neighbours as it is.

    Args:
        bucket: The bucket, with the weights of its ``row``.
        exchange: Sends a tensor, and returns those of the in-neighbours by rank.
    """

    def __init__(
        self,
        bucket: AveragedBucket,
        exchange: Callable[[torch.Tensor], Mapping[int, torch.Tensor]],
    ) -> None:
        self._bucket, self._exchange = bucket, exchange

    def __call__(self, tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Return what the in-neighbours give for a tensor, by rank.

        Args:
            tensor: ``bucket.flat``, or one of ``bucket.state``.
        """
        return self._exchange(tensor)

    def mixed(self, tensor: torch.Tensor) -> torch.Tensor:
        r"""Return :math:`\sum_j w_{ij} z_j` of a tensor z, as an exchange without a compressor."""
        row, received = self._bucket.row, self._exchange(tensor)
        assert row is not None
        total = tensor * row.self_weight
        for rank in row.sources:
            total.add_(received[rank], alpha=row.src_weights[rank])
        return total
