"""Base class of the compressors that keep k elements of each chunk and drop all others."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from typing_extensions import override

from asyncddp.compression.compressor import FieldCompressor, Views, fraction_of, require_count
from asyncddp.errors import ArgumentError

_RATIO = 0.01


@dataclass(frozen=True)
class Sparsifier(FieldCompressor):
    r"""Base class of compressors that keep k distinct elements of each chunk, and zero the rest.

    Args:
        ratio: What part of the elements is kept, at least one; 0.01 unless ``k`` is given.
        k: How many elements of each chunk are kept, instead.
    """

    ratio: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is None:
            ratio = _RATIO if self.ratio is None else self.ratio
            object.__setattr__(self, "ratio", fraction_of(f"{self.name}: argument ratio", ratio))
            return
        if self.ratio is not None:
            raise ArgumentError(
                f"{self.name}: expected one of the arguments ratio and k, got ratio="
                f"{self.ratio!r} and k={self.k!r}"
            )
        require_count(f"{self.name}: argument k", self.k)

    def kept(self, numel: int) -> int:
        """Return the number of elements that are kept of a chunk of ``numel`` elements.

        Raises:
            ArgumentError: A chunk has fewer than ``k``, or too many for indices of 32 bits.
        """
        if numel >= 1 << 31:
            raise ArgumentError(
                f"{self.name}: chunks of {numel} elements: indices have 32 bits; send it in parts"
            )
        if self.k is None:
            return min(numel, max(1, round((self.ratio or _RATIO) * numel)))
        if self.k > numel:
            raise ArgumentError(
                f"{self.name}: argument k: expected at most the {numel} elements of a chunk, got "
                f"{self.k}; give a ratio instead, or send larger tensors"
            )
        return self.k

    def contraction(self, numel: int) -> float | None:
        r"""Return :math:`k / S`."""
        return self.kept(numel) / numel

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        indices, values = self._found(self.views(encoded, chunks), chunks.shape[1])
        chunks.zero_().scatter_(1, indices, values)

    @override
    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        indices, values = self._found(self.views(encoded, chunks), chunks.shape[1])
        chunks.scatter_(1, indices, chunks.gather(1, indices).add_(values, alpha=weight))

    @abstractmethod
    def _found(self, fields: Views, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices, as int64, and values of the kept elements, both of shape ``(K, k)``."""
