"""Simulated compressors: one per rank and bucket, with the state and seeds of a real rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.allocation import empty, empty_like, zeros
from asyncddp.tensors.dtypes import DTYPES


class RankCodecs:
    """Compressors of one bucket's tensors, one per simulated rank.

    Args:
        compressor: The compressor.
        index: Index of the bucket, from which the seeds are derived as on real ranks.
        ranks: Ranks that encode, n.
        every: Distance between encoding ranks, if they encode for other ranks too.
    """

    def __init__(self, compressor: Compressor, index: int, ranks: int, every: int = 1) -> None:
        self._seeds = [every * (rank + index * ranks) for rank in range(ranks)]
        self._compressor = compressor
        self.each = [TensorCompressor(compressor, seed) for seed in self._seeds]

    def reset(self, ranks: Iterable[int]) -> None:
        """Make the compressors of some ranks anew, which then owe nothing."""
        for rank in ranks:
            self.each[rank] = TensorCompressor(self._compressor, self._seeds[rank])

    def decoded(self, sent: torch.Tensor) -> torch.Tensor:
        """Return each rank's tensor as decoded by receivers, ``(n, d)`` or ``(n, k, d)``."""
        found, width = empty(sent.shape, sent.dtype, sent.device), sent.shape[-1]
        pairs = zip(self.each, sent, strict=True)
        encoded = torch.cat([codec.encode(own.reshape(-1, width)) for codec, own in pairs])
        self.each[0].decode(encoded, found.view(-1, width))  # which needs no state of a rank
        return found

    def decoded_shares(self, means: torch.Tensor, local: int) -> torch.Tensor:
        """Return the machines' means as decoded, ``(n, d)``, equal on ranks of a machine.

        The ranks of a machine encode a share of it each.

        Args:
            means: The mean of each rank's machine, ``(n, d)``.
            local: Ranks of a machine.
        """
        found = empty(means.shape, means.dtype, means.device)
        for first in range(0, len(means), local):
            places = slice(first, first + local)
            shares = means[first].tensor_split(local), found[first].tensor_split(local)
            for codec, share, decoded in zip(self.each[places], *shares, strict=True):
                codec.decode(codec.encode(share.view(1, -1)), decoded.view(1, -1))
            found[places] = found[first].clone()
        return found

    def averaged(
        self, sent: torch.Tensor, divisor: float, among: Sequence[int] | None = None
    ) -> torch.Tensor:
        r"""Return the sum of all rows over ``divisor``, compressed as in an allreduce, ``(d,)``.

        Rank c sums the c-th of n equal parts, and sends it encoded to all; see
        :func:`asyncddp.ops.encoded_exchange.sum_encoded_over_group`.

        Args:
            sent: A row of each that takes part.
            divisor: Divisor of the sum.
            among: The ranks that take part; None for all.
        """
        each = self.each if among is None else [self.each[rank] for rank in among]
        ranks, numel = sent.shape
        width = -(-numel // ranks)
        parts = zeros((ranks, ranks, width), sent.dtype, sent.device)  # by sender and part
        parts.view(ranks, -1)[:, :numel].copy_(sent)
        total = zeros((ranks, width), DTYPES[sent.dtype].accumulate, sent.device)
        for codec, own in zip(each, parts, strict=True):
            total.add_(codec.decode(codec.encode(own), empty_like(own)))
        means = total.div_(divisor).to(sent.dtype)
        whole = empty(means.shape, means.dtype, means.device)
        for codec, mean, decoded in zip(each, _rows(means), _rows(whole), strict=True):
            codec.second_message.decode(codec.second_message.encode(mean), decoded)
        return whole.view(-1)[:numel]


def _rows(stacked: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View each row as a matrix with one row."""
    return torch.split(stacked, 1)
