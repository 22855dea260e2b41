"""Compressor ``minmax_uint8``: 8-bit quantisation between each chunk's minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views
from asyncddp.compression.piecewise import Pieces, PiecewiseCompressor, Scratch, pieces
from asyncddp.tensors.dtypes import DTYPES

_LEVELS, _SPREAD = 255, 1e-7


@dataclass(frozen=True)
class MinMaxUInt8(PiecewiseCompressor):
    r"""Bagua's 8-bit compressor: quantises each chunk to 256 levels from its minimum to maximum.

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
    alignment = 32

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: minimum and maximum, then one byte per element."""
        return (2, dtype), (numel, torch.uint8)

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        low, high = chunks.amin(1, keepdim=True), chunks.amax(1, keepdim=True)
        ends, codes = fields
        ends.copy_(torch.cat([low, high], 1))
        scale, upper = _lattice(low, high)
        lower = upper - _LEVELS
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks):
            part = chunks[at, columns]
            levels = scratch("levels", part.shape, scale.dtype)
            torch.mul(part.to(scale.dtype), scale[at], out=levels).round_()
            levels.clamp_(max=upper[at]).sub_(lower[at]).clamp_(0, _LEVELS)
            # by way of int32, which is faster than to uint8 at once
            codes[at, columns] = scratch("codes", part.shape, torch.int32).copy_(levels)

    @override
    def decoded_pieces(self, fields: Views, chunks: torch.Tensor) -> Pieces:
        ends, codes = fields
        scale, upper = _lattice(ends[:, :1], ends[:, 1:])
        lower = upper - _LEVELS
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks):
            part = chunks[at, columns]
            levels = scratch("levels", part.shape, scale.dtype).copy_(codes[at, columns])
            yield part, levels.add_(lower[at]).div_(scale[at])


def _lattice(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each chunk's scale, and its maximum as a level, in the accumulation dtype."""
    wide = DTYPES[low.dtype].accumulate
    low, high = low.to(wide), high.to(wide)
    scale = _LEVELS / (high - low + _SPREAD)
    return scale, (high * scale).round_()
