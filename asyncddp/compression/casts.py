"""Base class of the compressors that round each element to a shorter floating-point dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views
from asyncddp.compression.piecewise import Pieces, PiecewiseCompressor, Scratch, pieces
from asyncddp.tensors.dtypes import DTYPES


class Cast(PiecewiseCompressor):
    """Base class of compressors that round each element to a shorter dtype, clamped to its range.

    Infinities and NaN are kept.

    Attributes:
        to: The shorter dtype.
    """

    to: ClassVar[torch.dtype]

    @override
    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        return ((numel, self.to),)

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        short = fields[0]
        largest, given = torch.finfo(self.to).max, torch.finfo(chunks.dtype)
        if given.max <= largest:
            short.copy_(chunks)
            return
        wide, scratch = DTYPES[chunks.dtype].accumulate, Scratch(chunks.device)
        for piece in pieces(chunks):
            part = chunks[piece]
            within = scratch("within", part.shape, wide)
            torch.clamp(part.to(wide), -largest, largest, out=within)
            # adds at most 4 to the largest number, which rounding undoes, but keeps infinities
            short[piece] = within.add_(part, alpha=given.tiny)

    @override
    def decoded_pieces(self, fields: Views, chunks: torch.Tensor) -> Pieces:
        for piece in pieces(chunks):
            yield chunks[piece], fields[0][piece]
