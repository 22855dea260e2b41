"""Compressor ``sign``: keeps the sign of each element, and the mean magnitude of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views, padded
from asyncddp.compression.piecewise import Pieces, PiecewiseCompressor, Scratch, pieces
from asyncddp.tensors.allocation import arange, zeros
from asyncddp.tensors.dtypes import DTYPES

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the floats' sizes
_ONES = 0x0101010101010101  # in each byte of a word
_DIAGONAL = 0x8040201008040201 - (1 << 64)  # bit i in byte i
_CARRY = 0x00406070787C7E7F  # takes bit i of byte i to the byte's uppermost bit


@dataclass(frozen=True)
class Sign(PiecewiseCompressor):
    r"""Compressor that keeps the sign of each element, and the mean magnitude of each chunk.

    .. math:: Q(x) = \frac{\lVert x \rVert_1}{S} \operatorname{sign}(x)

    Zeros count as positive, negative zeros as negative. A chunk with an element that is not finite
    decodes to non-finite elements only.

    Example:
        >>> x = torch.tensor([[1.0, -2.0, 0.0, 5.0]])
        >>> q = Sign()
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> x.tolist(), bin(encoded[0, 8])
        ([[2.0, -2.0, 2.0, 2.0]], '0b10')

    References:
        Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs", Interspeech 2014.
        Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
        ICML 2019.
    """

    name: ClassVar[str] = "sign"
    wants_error_feedback = True
    costly_with = ("momentum", "betas")

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: the scale, in float32 or float64, and one bit per element."""
        return (1, DTYPES[dtype].accumulate), (-(-numel // 8), torch.uint8)

    def contraction(self, numel: int) -> float:
        r"""Return :math:`1 / S`; the worst case is a chunk with a single nonzero element."""
        return 1 / numel

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        rows, numel = chunks.shape
        wide = DTYPES[chunks.dtype].accumulate
        scale = zeros((rows, 1), torch.float64, chunks.device)
        sent, bits = fields
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks, 64):
            part = chunks[at, columns]
            magnitudes = torch.abs(part, out=scratch("part", part.shape, part.dtype))
            scale[at] += magnitudes.sum(1, keepdim=True, dtype=wide)
            packed = _pack(part, scratch)
            bits[at, columns.start // 8 :][:, : packed.shape[1]] = packed
        sent.copy_(scale.div_(numel))

    @override
    def decoded_pieces(self, fields: Views, chunks: torch.Tensor) -> Pieces:
        scale, bits = fields
        words = _sign_words(chunks.device)
        scratch = Scratch(chunks.device)
        for at, columns in pieces(chunks, 64):
            part = chunks[at, columns]
            rows, count = part.shape
            size = -(-count // 8)
            packed = bits[at, columns.start // 8 :][:, :size]
            indices = scratch("indices", (rows, size), torch.int32).copy_(packed).view(-1)
            found = scratch("signs", (rows * size,), torch.int64)
            torch.index_select(words, 0, indices, out=found)
            signs = found.view(torch.int8).view(rows, -1)[:, :count]
            yield part, scratch("part", part.shape, scale.dtype).copy_(signs).mul_(scale[at])


def _pack(part: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Pack the signs of 8 elements into an int64 from 0 to 255; bit i is the sign of element i."""
    rows, numel = part.shape
    size = part.element_size()
    integers = part.view(_INTEGERS[size])
    spread = scratch("part", part.shape, integers.dtype)
    torch.bitwise_right_shift(integers, 8 * size - 1, out=spread)
    signs = scratch("signs", (rows, padded(numel)), torch.uint8)
    signs[:, :numel] = spread
    signs[:, numel:] = 0
    words = signs.view(torch.int64).bitwise_and_(_DIAGONAL).mul_(_ONES)
    return words.bitwise_right_shift_(56)


def _sign_words(device: torch.device) -> torch.Tensor:
    """Compute the table that unpacks a byte into eight signs: -1 or 1 in each byte of an int64."""
    words = arange(256, torch.int64, device).mul_(_ONES).bitwise_and_(_DIAGONAL)
    words.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_ONES)
    return words.mul_(254).add_(_ONES)
