"""Compressors ``qsgd_int8`` and ``qsgd_int4``: unbiased stochastic quantisation of blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views
from asyncddp.compression.counter_random import random_words
from asyncddp.compression.piecewise import Pieces, PiecewiseCompressor, Scratch, pieces
from asyncddp.errors import ArgumentError
from asyncddp.tensors.dtypes import DTYPES

_BLOCK = 256  # elements, by default
_BLOCK_MULTIPLE = 8
_TILE = 1 << 13  # elements of the random numbers that are used again and again


@dataclass(frozen=True)
class QSGD(PiecewiseCompressor):
    r"""Base class of QSGD: stochastically rounds each block's elements to L levels of either sign.

    .. math:: s = \max_{i \in \text{block}} |x_i|, \qquad
              c_i = \mathrm{floor}\big(\tfrac{L}{s} x_i + u_i\big), \quad u_i \sim U[0, 1), \qquad
              \hat x_i = \frac{s}{L} c_i

    It is unbiased, to :math:`2^{-15}` of a level, and the errors of any two elements are
    uncorrelated. The error of an element is below :math:`s / L`. A block with an element that is
    not finite decodes to non-finite elements only.

    Args:
        block_size: Elements of a block, a multiple of 8.

    References:
        Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding",
        NeurIPS 2017.
    """

    block_size: int = _BLOCK

    bits: ClassVar[int]
    levels: ClassVar[int]
    unbiased = True

    def __post_init__(self) -> None:
        size: object = self.block_size
        if isinstance(size, int) and size > 0 and size % _BLOCK_MULTIPLE == 0:
            return
        raise ArgumentError(
            f"{self.name}: argument block_size: expected a positive multiple of {_BLOCK_MULTIPLE}, "
            f"got {size!r}"
        )

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: scales of the blocks, and codes of the elements."""
        return (-(-numel // self.block_size), dtype), (self._bytes(numel), torch.uint8)

    def contraction(self, numel: int) -> float | None:
        r"""Return :math:`\frac{3}{2} - \frac{1}{2} \sqrt{1 + (b - 1) / L^2}` if it is positive.

        b is the size of a block. The largest element of a block is exact; in the worst case all
        other elements are equal.
        """
        others = min(self.block_size, numel) - 1
        delta = 1.5 - 0.5 * sqrt(1 + others / self.levels**2)
        return delta if delta > 0 else None

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        scales, codes = fields
        noise = RoundingNoise(seed, chunks, self.block_size, self.bits)
        scratch = Scratch(chunks.device)
        for rows, columns, blocks, size in self._parts(chunks, noise.tile_blocks):
            x = _blocks(chunks[rows, columns], size)
            noisy = noise.of(rows, blocks, size, scratch)
            largest = torch.maximum(x.amax(2), x.amin(2).neg_())
            scales[rows, blocks] = largest
            _add_shares(noisy, x, largest, self.levels, scratch)
            levels = scratch("part", x.shape, torch.int32).copy_(noisy)
            packed = codes[rows, self._bytes(columns.start) : self._bytes(columns.stop)]
            self._pack(levels, _blocks(packed, self._bytes(size)))

    @override
    def decoded_pieces(self, fields: Views, chunks: torch.Tensor) -> Pieces:
        wide = DTYPES[chunks.dtype].accumulate
        scales, codes = fields
        scratch = Scratch(chunks.device)
        for rows, columns, blocks, size in self._parts(chunks):
            part = _blocks(chunks[rows, columns], size)
            packed = codes[rows, self._bytes(columns.start) : self._bytes(columns.stop)]
            levels = scratch("part", part.shape, wide)
            self._unpack(_blocks(packed, self._bytes(size)), levels)
            yield part, levels.mul_(scales[rows, blocks].to(wide).div(self.levels).unsqueeze(2))

    def _parts(
        self, chunks: torch.Tensor, multiple: int = 1
    ) -> Iterator[tuple[slice, slice, slice, int]]:
        """Yield rows, columns, block range and block size of each piece."""
        numel, size = chunks.shape[1], self.block_size
        whole = numel // size * size
        for rows, columns in pieces(chunks[:, :whole], multiple * size):
            yield rows, columns, slice(columns.start // size, columns.stop // size), size
        for rows, _ in pieces(chunks[:, whole:], size):
            rest = slice(whole // size, whole // size + 1)
            yield rows, slice(whole, numel), rest, numel - whole

    def _bytes(self, numel: int) -> int:
        """Compute the size in bytes of the codes of ``numel`` elements."""
        return -(-numel * self.bits // 8)

    @abstractmethod
    def _pack(self, levels: torch.Tensor, codes: torch.Tensor) -> None:
        """Pack int32 levels, which are offset by 2ⁿ, into codes."""

    @abstractmethod
    def _unpack(self, codes: torch.Tensor, levels: torch.Tensor) -> None:
        """Unpack codes into floating-point levels."""


def _add_shares(
    noisy: torch.Tensor, x: torch.Tensor, largest: torch.Tensor, levels: int, scratch: Scratch
) -> None:
    """Add ``levels`` times x divided by its block's largest magnitude; blocks of zeros add zero."""
    wide = DTYPES[x.dtype].accumulate
    smallest = torch.finfo(wide).tiny * torch.finfo(wide).eps
    divisors = largest.to(wide).clamp_(min=smallest).unsqueeze(2)
    shares = torch.div(x, divisors, out=scratch("part", x.shape, wide))
    noisy.add_(shares, alpha=levels)


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view of rows as blocks, of shape ``(rows, blocks, size)``."""
    return rows.view(rows.shape[0], -1, size)


@dataclass(frozen=True)
class QSGDInt8(QSGD):
    """QSGD with 127 levels of either sign, one byte per element.

    Example:
        >>> x = torch.tensor([[127.0, -3.0, 0.0, 0.25]])
        >>> q = QSGDInt8()
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded, seed=3)
        >>> encoded[0, 8:12].view(torch.int8).tolist()
        [127, -3, 0, 0]
    """

    name: ClassVar[str] = "qsgd_int8"
    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127

    @override
    def _pack(self, levels: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(levels)  # modulo 256

    @override
    def _unpack(self, codes: torch.Tensor, levels: torch.Tensor) -> None:
        levels.copy_(codes.view(torch.int8))


@dataclass(frozen=True)
class QSGDInt4(QSGD):
    """QSGD with 7 levels of either sign, two elements per byte.

    A byte has a code of the first half of the block, plus 8, in its lower bits, and one of the
    second half in its upper bits.

    Example:
        >>> x = torch.tensor([[7.0, -3.0, 0.0, 1.0]])
        >>> q = QSGDInt4()
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded, seed=3)
        >>> [hex(byte) for byte in encoded[0, 8:10].tolist()]
        ['0x8f', '0x95']
    """

    name: ClassVar[str] = "qsgd_int4"
    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7

    @override
    def _pack(self, levels: torch.Tensor, codes: torch.Tensor) -> None:
        half = codes.shape[2]
        packed = levels[..., :half].sub_(8)
        packed[..., : levels.shape[2] - half].add_(levels[..., half:].sub_(8), alpha=16)
        codes.copy_(packed)

    @override
    def _unpack(self, codes: torch.Tensor, levels: torch.Tensor) -> None:
        half = codes.shape[2]
        levels[..., :half] = codes.bitwise_and(15).view(torch.int8).sub_(8)
        upper = codes.bitwise_right_shift(4).view(torch.int8).sub_(8)
        levels[..., half:] = upper[..., : levels.shape[2] - half]


class RoundingNoise:
    """Noise for stochastic rounding: pairwise independent random numbers in a unit interval.

    The interval is [2ⁿ, 2ⁿ + 1). Truncation of a number larger than -2ⁿ plus this noise rounds it
    up or down at random, without bias. The noise of one tile of blocks is drawn; the fraction
    bits of further blocks are the exclusive or of the tile's bits and one random word of the block,
    which costs a tenth.

    Args:
        seed: Of the random numbers.
        chunks: The tensor that is rounded, of shape ``(K, S)``.
        size: Elements of a block.
        bits: The n; 23 - n bits of each number are random.

    Attributes:
        tile_blocks: Blocks of the tile.
    """

    def __init__(self, seed: int, chunks: torch.Tensor, size: int, bits: int) -> None:
        rows, numel = chunks.shape
        blocks = -(-numel // size)
        self.tile_blocks = max(1, min(_TILE // size, blocks))
        tile = self.tile_blocks * size
        words = random_words(seed, tile // 2 + -(-rows * blocks // 2), chunks.device)
        halves = words.view(torch.int32).bitwise_and_((1 << (23 - bits)) - 1)
        self._words = halves[tile : tile + rows * blocks].view(rows, blocks, 1)
        base = (127 + bits) << 23  # the bits of the float 2ⁿ
        self._tile = halves[:tile].view(self.tile_blocks, size).bitwise_or_(base)
        self._repeated = self._tile

    def of(self, rows: slice, blocks: slice, size: int, scratch: Scratch) -> torch.Tensor:
        """Compute the noise of ``size`` elements per block: float32, ``(rows, blocks, size)``."""
        words = self._words[rows, blocks]
        first = blocks.start % self.tile_blocks
        last = first + words.shape[1]
        if self._repeated.shape[0] < last:
            self._repeated = self._tile.repeat(-(-last // self.tile_blocks), 1)
        noise = scratch("noise", (*words.shape[:2], size), torch.int32)
        torch.bitwise_xor(self._repeated[first:last, :size], words, out=noise)
        return noise.view(torch.float32)
