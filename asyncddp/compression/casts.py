"""Base class of the compressors that round each element to a shorter floating-point dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import CompressorState, clear_padding, field, padded
from asyncddp.compression.piecewise import PiecewiseCompressor, Scratch, pieces
from asyncddp.tensors.dtypes import DTYPES


class Cast(PiecewiseCompressor):
    """Rounds each element to a shorter dtype; what lies beyond its largest number becomes that.

    Infinities and NaN stay what they are.

    Attributes:
        to: The dtype that is sent.
    """

    to: ClassVar[torch.dtype]

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        """Compute the bytes of an encoded chunk: two per element, padded."""
        return padded(numel * self.to.itemsize)

    @override
    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        short = field(encoded, 0, chunks.shape[1], self.to)
        clear_padding(encoded, short.shape[1] * self.to.itemsize)
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
    def decoded_pieces(
        self, encoded: torch.Tensor, chunks: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        short = field(encoded, 0, chunks.shape[1], self.to)
        for piece in pieces(chunks):
            yield chunks[piece], short[piece]
