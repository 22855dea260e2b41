"""Tensor compressor: a compressor with the state and the seeds of one tensor."""

from __future__ import annotations

from functools import cached_property

import torch

from asyncddp.compression.compressor import Compressor, CompressorState, require_chunks
from asyncddp.tensors.allocation import empty

_SEEDS = (1 << 63) - 1
_SECOND = 0x5DEECE66D
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive seeds over all bits


class TensorCompressor:
    """Compressor of one tensor that is sent again and again, with its state and a seed per use.

    Args:
        compressor: The compressor.
        seed: From which the seed of each use is derived; the same gives the same bytes.

    Attributes:
        state: What the compressor remembers of the tensor; empty before the first use.
        uses: Number of uses so far.

    Example:
        >>> from asyncddp.compression import compressor_for
        >>> halves = TensorCompressor(compressor_for("doctest", "bf16"))
        >>> encoded = halves.encode(torch.tensor([[1.0, 2.5]]))
        >>> halves.decode(encoded, torch.empty(1, 2))
        tensor([[1.0000, 2.5000]])
    """

    def __init__(self, compressor: Compressor, seed: int = 0) -> None:
        self.compressor, self.seed = compressor, seed
        self.state: CompressorState = {}
        self.uses = 0

    @cached_property
    def second_message(self) -> TensorCompressor:
        """Return the compressor of the averages that a rank sends on, with a state of its own."""
        return TensorCompressor(self.compressor, self.seed ^ _SECOND)

    def encode(self, chunks: torch.Tensor) -> torch.Tensor:
        """Encode chunks of shape ``(K, S)``, and give uint8 of shape ``(K, B)``.

        Raises:
            DtypeError: The dtype is none of float16, bfloat16, float32 and float64.
            ArgumentError: The tensor is not contiguous, of another shape, or has empty chunks.
        """
        require_chunks(self.compressor.name, chunks)
        if not self.uses:
            self.state = self.state or self.compressor.new_state(chunks)
        rows, numel = chunks.shape
        size = self.compressor.encoded_size(numel, chunks.dtype)
        encoded = empty((rows, size), torch.uint8, chunks.device)
        seed = (self.seed * _GOLDEN + self.uses * (_GOLDEN >> 7)) & _SEEDS
        self.compressor.encode(chunks, encoded, seed=seed, state=self.state or None)
        self.uses += 1
        return encoded

    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """Decode into chunks of shape ``(K, S)``, which are returned."""
        self.compressor.decode(encoded, chunks)
        return chunks

    def decode_add(
        self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float, dtype: torch.dtype
    ) -> None:
        """Add ``weight`` times the decoded tensor of a dtype to chunks, which may be wider."""
        if dtype == chunks.dtype:
            self.compressor.decode_add(encoded, chunks, weight)
        else:
            chunks.add_(
                self.decode(encoded, empty(chunks.shape, dtype, chunks.device)), alpha=weight
            )
