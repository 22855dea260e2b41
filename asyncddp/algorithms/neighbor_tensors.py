"""Uncompressed exchange of tensors with neighbours, outside of averaging rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket


class NeighborTensors:
    """Callable that sends a tensor to the out-neighbours, and returns those of the in-neighbours.

    Args:
        bucket: The bucket, with the weights of its ``row``.
        exchange: Sends a tensor, and returns the tensors of the in-neighbours by rank.
    """

    def __init__(
        self,
        bucket: AveragedBucket,
        exchange: Callable[[torch.Tensor], Mapping[int, torch.Tensor]],
    ) -> None:
        self._bucket, self._exchange = bucket, exchange

    def __call__(self, tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Exchange a tensor; return the in-neighbours' tensors by rank.

        Args:
            tensor: ``bucket.flat``, or one of ``bucket.state``.
        """
        return self._exchange(tensor)

    def mixed(self, tensor: torch.Tensor) -> torch.Tensor:
        r"""Exchange a tensor z uncompressed; return the average :math:`\sum_j w_{ij} z_j`."""
        row, received = self._bucket.row, self._exchange(tensor)
        assert row is not None
        total = tensor * row.self_weight
        for rank in row.sources:
            total.add_(received[rank], alpha=row.src_weights[rank])
        return total
