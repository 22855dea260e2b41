"""``minmax_uint8``: 8-bit quantisation between the minimum and maximum of each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import CompressorState, clear_padding, field, padded
from asyncddp.compression.piecewise import PiecewiseCompressor, Scratch, pieces
from asyncddp.tensors.dtypes import DTYPES

_HEADER = 32  # bytes: the minimum and the maximum in the chunk's dtype, and padding
_LEVELS, _SPREAD = 255, 1e-7


@dataclass(frozen=True)
class MinMaxUInt8(PiecewiseCompressor):
    r"""Quantise each chunk to 256 levels between its minimum and maximum; Bagua's compressor.

    .. math:: s = \frac{255}{\max - \min + 10^{-7}}, \quad u = \mathrm{rint}(s \max), \quad
              c = \mathrm{clamp}\big(\min(\mathrm{rint}(s v), u) - u + 255, 0, 255\big), \quad
              \hat v = \frac{c + u - 255}{s}

    Zero is exact wherever it lies between minimum and maximum, and the error of an element is at
    most :math:`(\max - \min + 10^{-7}) / 510`, up to rounding. The bytes are Bagua's, but for the
    clamp, without which a large common offset could turn a maximum into the minimum. A chunk with
    an element that is not finite, or a range that the dtype cannot hold, decodes to elements none
    of which is finite.

    Example:
        >>> x = torch.tensor([[-1.0, 0.0, 0.5, 2.0]])
        >>> q = MinMaxUInt8()
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> encoded[0, 32:36].tolist()
        [0, 85, 127, 255]

    References:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021.
    """

    name: ClassVar[str] = "minmax_uint8"

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        """Compute the bytes of an encoded chunk: 32 for the header, one per element, padded."""
        return _HEADER + padded(numel, _HEADER)

    @override
    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        low, high = chunks.amin(1, keepdim=True), chunks.amax(1, keepdim=True)
        field(encoded, 0, 1, chunks.dtype).copy_(low)
        field(encoded, chunks.element_size(), 1, chunks.dtype).copy_(high)
        clear_padding(encoded, 2 * chunks.element_size(), _HEADER)
        clear_padding(encoded, _HEADER + chunks.shape[1], _HEADER)
        scale, upper = _lattice(low, high)
        lower = upper - _LEVELS
        codes = field(encoded, _HEADER, chunks.shape[1], torch.uint8)
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks):
            part = chunks[at, columns]
            levels = scratch("levels", part.shape, scale.dtype)
            torch.mul(part.to(scale.dtype), scale[at], out=levels).round_()
            levels.clamp_(max=upper[at]).sub_(lower[at]).clamp_(0, _LEVELS)
            # by way of int32, which is faster than to uint8 at once
            codes[at, columns] = scratch("codes", part.shape, torch.int32).copy_(levels)

    @override
    def decoded_pieces(
        self, encoded: torch.Tensor, chunks: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        low = field(encoded, 0, 1, chunks.dtype)
        high = field(encoded, chunks.element_size(), 1, chunks.dtype)
        scale, upper = _lattice(low, high)
        lower = upper - _LEVELS
        codes = field(encoded, _HEADER, chunks.shape[1], torch.uint8)
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks):
            part = chunks[at, columns]
            levels = scratch("levels", part.shape, scale.dtype).copy_(codes[at, columns])
            yield part, levels.add_(lower[at]).div_(scale[at])


def _lattice(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the scale of each chunk and its largest multiple, in the accumulation dtype."""
    wide = DTYPES[low.dtype].accumulate
    low, high = low.to(wide), high.to(wide)
    scale = _LEVELS / (high - low + _SPREAD)
    return scale, (high * scale).round_()
