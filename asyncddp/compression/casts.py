"""Base class of the compressors that round each element to a shorter floating-point dtype."""

from __future__ import annotations

from typing import ClassVar

import torch

from asyncddp.compression.compressor import Compressor, CompressorState, field, padded
from asyncddp.compression.pieces import pieces


class Cast(Compressor):
    """Rounds each element to a shorter dtype; what lies beyond its largest number becomes that.

    Infinities and NaN stay what they are.

    Attributes:
        to: The dtype that is sent.
    """

    to: ClassVar[torch.dtype]

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        """Compute the bytes of an encoded chunk: two per element, padded."""
        return padded(numel * self.to.itemsize)

    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        """Encode chunks."""
        short = field(encoded, 0, chunks.shape[1], self.to)
        largest, given = torch.finfo(self.to).max, torch.finfo(chunks.dtype)
        if given.max <= largest:
            short.copy_(chunks)
            return
        for piece in pieces(chunks):
            part = chunks[piece]
            # adds at most 4 to the largest number, which rounding undoes, but keeps infinities
            short[piece] = part.clamp(-largest, largest).add_(part, alpha=given.tiny)

    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        """Decode into chunks."""
        chunks.copy_(field(encoded, 0, chunks.shape[1], self.to))

    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times the decoded chunks to ``chunks``."""
        short = field(encoded, 0, chunks.shape[1], self.to)
        for piece in pieces(chunks):
            chunks[piece].add_(short[piece], alpha=weight)
