"""Compressors of all ranks: each encodes its own row as on real ranks, with state and seeds."""

from __future__ import annotations

import torch

from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.allocation import empty, empty_like, zeros
from asyncddp.tensors.dtypes import DTYPES


class RankCodecs:
    """Compressors of one bucket on n ranks.

    Args:
        compressor: The compressor.
        index: Index of the bucket, from which the seeds are derived as on real ranks.
        ranks: Number of ranks, n.
    """

    def __init__(self, compressor: Compressor, index: int, ranks: int) -> None:
        self.each = [TensorCompressor(compressor, rank + index * ranks) for rank in range(ranks)]

    def decoded(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what receivers decode of what each rank sends, ``(n, d)`` or ``(n, k, d)``."""
        found, width = empty(sent.shape, sent.dtype, sent.device), sent.shape[-1]
        for codec, own, decoded in zip(self.each, sent, found, strict=True):
            codec.decode(codec.encode(own.reshape(-1, width)), decoded.view(-1, width))
        return found

    def averaged(self, sent: torch.Tensor, divisor: float) -> torch.Tensor:
        r"""Return the sum of all rows over ``divisor``, as an allreduce encodes it, ``(d,)``.

        Rank c sums the c-th of n equal parts, and sends it encoded to all; see
        :func:`asyncddp.ops.encoded_exchange.sum_encoded_over_group`.
        """
        ranks, numel = sent.shape
        width = -(-numel // ranks)
        parts = zeros((ranks, ranks, width), sent.dtype, sent.device)  # by sender and part
        parts.view(ranks, -1)[:, :numel].copy_(sent)
        total = zeros((ranks, width), DTYPES[sent.dtype].accumulate, sent.device)
        for codec, own in zip(self.each, parts, strict=True):
            total.add_(codec.decode(codec.encode(own), empty_like(own)))
        means = total.div_(divisor).to(sent.dtype)
        whole = empty(means.shape, means.dtype, means.device)
        for codec, mean, decoded in zip(self.each, _rows(means), _rows(whole), strict=True):
            codec.second_message.decode(codec.second_message.encode(mean), decoded)
        return whole.view(-1)[:numel]


def _rows(stacked: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View each row as a matrix of one row."""
    return torch.split(stacked, 1)
