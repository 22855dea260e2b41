"""Compressor ``top_k``: keeps the k largest elements of each chunk, with their indices."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views
from asyncddp.compression.piecewise import Scratch, pieces
from asyncddp.compression.sparsifier import Sparsifier
from asyncddp.tensors.allocation import empty

_SAMPLE = 1 << 14  # elements of a row, from which a lower bound of the largest ones is found


@dataclass(frozen=True)
class TopK(Sparsifier):
    r"""Compressor that keeps the k elements of largest magnitude of each chunk.

    Of equal ones any may be kept. NaN counts as larger than all numbers.

    Example:
        >>> x = torch.tensor([[1.0, -4.0, 0.5, 3.0]])
        >>> q = TopK(k=2)
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> x.tolist()
        [[0.0, -4.0, 0.0, 3.0]]

    References:
        Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
        Lin et al., "Deep gradient compression", ICLR 2018.
    """

    name: ClassVar[str] = "top_k"
    wants_error_feedback = True
    costly_with = ("momentum", "betas")

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: k indices, and k values."""
        k = self.kept(numel)
        return (k, torch.int32), (k, dtype)

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        rows, numel = chunks.shape
        k = self.kept(numel)
        if chunks.device.type == "cpu" and numel > 4 * _SAMPLE:
            indices = empty((rows, k), torch.int64, chunks.device)
            for row in range(rows):
                indices[row] = _largest(chunks[row], k)
        else:
            indices = chunks.abs().topk(k, sorted=False).indices
        places, values = fields
        places.copy_(indices)
        values.copy_(chunks.gather(1, indices))

    @override
    def _found(self, fields: Views, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = fields
        return indices.to(torch.int64), values


def _largest(row: torch.Tensor, k: int) -> torch.Tensor:
    """Find the k largest elements of a long row among candidates above a bound from a sample."""
    sample = row[:: row.numel() // _SAMPLE].abs()
    expected = k * sample.numel() / row.numel()
    rank = ceil(expected + 4 * sqrt(expected) + 4)  # so that k elements reach it, almost surely
    if rank >= sample.numel():
        return row.abs().topk(k, sorted=False).indices
    bound = sample.topk(rank).values[-1]
    found, scratch = [], Scratch(row.device)
    for _, columns in pieces(row.unsqueeze(0)):
        part = row[columns]
        magnitudes = torch.abs(part, out=scratch("magnitudes", part.shape, part.dtype))
        below = torch.lt(magnitudes, bound, out=scratch("below", part.shape, torch.bool))
        # NaN is not below
        found.append(below.logical_not_().nonzero().squeeze(1).add_(columns.start))
    candidates = torch.cat(found)
    if candidates.numel() < k:
        return row.abs().topk(k, sorted=False).indices
    return candidates[row[candidates].abs().topk(k, sorted=False).indices]
