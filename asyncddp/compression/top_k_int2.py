"""Compressor ``top_k_int2``: keeps each block's k largest elements, as 2-bit codes with indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import (
    FieldCompressor,
    Fields,
    State,
    Views,
    require_count,
)
from asyncddp.tensors.allocation import zeros
from asyncddp.tensors.dtypes import DTYPES

_BLOCK = 64 * 64
_LEVELS = 4
_WIDTH = 1.5  # of a bin, in standard deviations: four of them span six


@dataclass(frozen=True)
class TopKInt2(FieldCompressor):
    r"""Compressor that keeps each block's k largest elements, quantised to four values per chunk.

    .. math:: c_i = [v_i \ge \mu - \tfrac32 \sigma] + [v_i \ge \mu]
              + [v_i \ge \mu + \tfrac32 \sigma], \qquad
              \hat v_i = \frac{\sum_{j : c_j = c_i} v_j}{|\{j : c_j = c_i\}|}

    with :math:`\mu` and :math:`\sigma` the mean and the standard deviation of all values that are
    kept of a chunk. A value is the mean of those in its bin, so that large sums are right. Blocks
    are 4096 consecutive elements, which ``sparse_loco`` makes tiles of 64 × 64 of matrices.

    Args:
        k: How many elements of a block are kept, from 1 to 4096.

    Example:
        >>> x = torch.tensor([[1.0, -4.0, 0.5, 3.0]])
        >>> q = TopKInt2(k=2)
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> x.tolist()
        [[0.0, -4.0, 0.0, 3.0]]

    References:
        Sarfi, Thérien, Lidin, Belilovsky, "Communication efficient LLM pre-training with
        SparseLoCo", 2025.
    """

    k: int = 64

    name: ClassVar[str] = "top_k_int2"
    wants_error_feedback = True
    costly_with = ("betas",)

    def __post_init__(self) -> None:
        require_count(f"{self.name}: argument k", self.k, _BLOCK)

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: four values, then a 12-bit index and a 2-bit code per kept element."""
        count = self._count(numel)
        packed = (3 * -(-count // 2), torch.uint8), (-(-count // 4), torch.uint8)
        return (_LEVELS, DTYPES[dtype].accumulate), *packed

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        rows, numel = chunks.shape
        wide, blocks = DTYPES[chunks.dtype].accumulate, -(-numel // _BLOCK)
        magnitudes = zeros((rows, blocks * _BLOCK), chunks.dtype, chunks.device).sub_(1.0)
        torch.abs(chunks, out=magnitudes[:, :numel])
        per_block = self._count(numel) // blocks
        indices = magnitudes.view(rows, blocks, _BLOCK).topk(per_block, sorted=False).indices
        places, there = _places(indices.flatten(1), per_block, numel)
        values = torch.where(there, chunks.gather(1, places).to(wide), 0.0)
        codes = _codes(values, there)
        table, packed_indices, packed_codes = fields
        for level in range(_LEVELS):
            member = there & (codes == level)
            total = torch.where(member, values, 0.0).sum(1)
            table[:, level] = total / member.sum(1).clamp_(min=1)
        pairs = _filled(indices.flatten(1).to(torch.int32), 2)
        first, second = pairs[..., 0], pairs[..., 1]
        middle = first.bitwise_right_shift(8) + second.bitwise_and(15) * 16
        parts = [first.bitwise_and(255), middle, second.bitwise_right_shift(4)]
        packed_indices.copy_(torch.stack(parts, -1).flatten(1))
        quads = _filled(codes, 4)
        packed_codes.copy_(sum(quads[..., place] * 4**place for place in range(4)))

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        self.decode_add(encoded, chunks.zero_())

    @override
    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        numel = chunks.shape[1]
        count = self._count(numel)
        table, packed_indices, packed_codes = self.views(encoded, chunks)
        bytes_of = packed_indices.to(torch.int64).reshape(len(encoded), -1, 3)
        low, middle, high = bytes_of[..., 0], bytes_of[..., 1], bytes_of[..., 2]
        first = low + middle.bitwise_and(15) * 256
        second = middle.bitwise_right_shift(4) + high * 16
        indices = torch.stack([first, second], -1).flatten(1)[:, :count]
        places, there = _places(indices, count // -(-numel // _BLOCK), numel)
        quads = [packed_codes.bitwise_right_shift(2 * place).bitwise_and(3) for place in range(4)]
        codes = torch.stack(quads, -1).flatten(1)[:, :count].to(torch.int64)
        values = torch.where(there, table.gather(1, codes), 0.0)
        chunks.scatter_add_(1, places, values.mul_(weight).to(chunks.dtype))

    def _count(self, numel: int) -> int:
        """Return the number of kept elements of a chunk, including padding in its last block."""
        blocks = -(-numel // _BLOCK)
        return blocks * (min(self.k, numel) if blocks == 1 else self.k)


def _places(indices: torch.Tensor, per_block: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert block indices to chunk indices; also return a mask of indices inside the chunk."""
    by_block = indices.reshape(len(indices), -1, per_block)
    starts = zeros((by_block.shape[1],), torch.int64, indices.device).add_(_BLOCK).cumsum_(0)
    places = by_block.add(starts.sub_(_BLOCK).unsqueeze(1)).flatten(1)
    there = places < numel
    return torch.where(there, places, 0), there


def _codes(values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return each value's bin, from 0 to 3, as int32."""
    count = there.sum(1, keepdim=True)
    mean = values.sum(1, keepdim=True) / count
    spread = (
        torch.where(there, values - mean, 0.0).square().sum(1, keepdim=True).div_(count).sqrt_()
    )
    bounds = (mean - _WIDTH * spread, mean, mean + _WIDTH * spread)
    codes = zeros(values.shape, torch.int32, values.device)
    for bound in bounds:
        codes.add_(values >= bound)
    return codes


def _filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Group each row's elements by ``size``, padding the last group with zeros."""
    more = -rows.shape[1] % size
    if more:
        end = zeros((rows.shape[0], more), rows.dtype, rows.device)
        rows = torch.cat([rows, end], 1)
    return rows.reshape(len(rows), -1, size)
