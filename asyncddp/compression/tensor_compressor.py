"""Tensor compressor: a compressor together with the state and the seeds of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from asyncddp.compression.compressor import Compressor, CompressorState, require_chunks
from asyncddp.tensors.allocation import detached_copy, empty

_SEEDS = (1 << 63) - 1
_SECOND = 0x5DEECE66D
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive seeds over all bits


class TensorCompressor:
    """Compressor of one tensor that is sent repeatedly: keeps its state, and a new seed per use.

    Args:
        compressor: The compressor.
        seed: Base seed, from which the seed of each use is derived.

    Attributes:
        state: State of the compressor for this tensor; empty before the first use.
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
        self._form: tuple[int, ...] | None = None  # shape of the chunks that the state belongs to
        self._loaded = False

    @cached_property
    def second_message(self) -> TensorCompressor:
        """Return the compressor for averages that a rank sends back, with a state of its own."""
        return TensorCompressor(self.compressor, self.seed ^ _SECOND)

    def encode(self, chunks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encode chunks of shape ``(K, S)`` into uint8 of shape ``(K, B)``: ``out`` or new memory.

        Raises:
            DtypeError: The dtype is none of float16, bfloat16, float32 and float64.
            ArgumentError: The tensor is not contiguous, of another shape, or has empty chunks.
        """
        require_chunks(self.compressor.name, chunks)
        form = tuple(chunks.shape)
        if self._form != form:
            self.state, self._form = self.compressor.new_state(chunks), form
        elif self._loaded:
            self.state = {key: one.to(chunks.device) for key, one in self.state.items()}
        self._loaded = False
        encoded = self.unwritten(chunks) if out is None else out
        seed = (self.seed * _GOLDEN + self.uses * (_GOLDEN >> 7)) & _SEEDS
        self.compressor.encode(chunks, encoded, seed=seed, state=self.state or None)
        self.uses += 1
        return encoded

    def unwritten(self, chunks: torch.Tensor) -> torch.Tensor:
        """Allocate a tensor for encoded chunks of shape ``(K, S)``: uint8, shape ``(K, B)``."""
        rows, numel = chunks.shape
        size = self.compressor.encoded_size(numel, chunks.dtype)
        return empty((rows, size), torch.uint8, chunks.device)

    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """Decode into chunks of shape ``(K, S)``, and return them."""
        self.compressor.decode(encoded, chunks)
        return chunks

    def decode_add(
        self,
        encoded: torch.Tensor,
        chunks: torch.Tensor,
        weight: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add ``weight`` times the decoded tensor to chunks; ``dtype`` is the decoded dtype."""
        if dtype is None or dtype == chunks.dtype:
            self.compressor.decode_add(encoded, chunks, weight)
        else:
            chunks.add_(
                self.decode(encoded, empty(chunks.shape, dtype, chunks.device)), alpha=weight
            )

    def forget(self) -> None:
        """Reset the state of the tensor; the sequence of seeds continues."""
        self.state, self._form, self._loaded = {}, None, False
        if "second_message" in self.__dict__:
            self.second_message.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: compressor state, chunk shape, number of uses."""
        found = {"state": self.state, "shape": self._form, "uses": self.uses}
        if "second_message" in self.__dict__:
            found["second_message"] = self.second_message.state_dict()
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` gave; chunks of another shape reset it."""
        self.state = {key: detached_copy(tensor) for key, tensor in saved["state"].items()}
        self._form, self.uses, self._loaded = saved["shape"], saved["uses"], True
        self.__dict__.pop("second_message", None)
        if "second_message" in saved:
            self.second_message.load_state_dict(saved["second_message"])
