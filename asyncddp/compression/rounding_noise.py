"""Random numbers by which stochastic rounding rounds up or down."""

from __future__ import annotations

import torch

from asyncddp.compression.counter_random import random_words
from asyncddp.compression.piecewise import Scratch

_TILE = 1 << 13  # elements


class RoundingNoise:
    """Random numbers in [2ⁿ, 2ⁿ + 1) for all elements, any two of which are independent.

    Added to numbers that are larger than -2ⁿ, they let truncation round these up or down at random,
    without bias. Those of a tile of blocks are drawn, and the fraction bits of further blocks are
    the exclusive or of the tile's with a random word of each block, which costs a tenth.

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
        """Compute the noise of the first elements of blocks: float32, ``(rows, blocks, size)``."""
        words = self._words[rows, blocks]
        first = blocks.start % self.tile_blocks
        last = first + words.shape[1]
        if self._repeated.shape[0] < last:
            self._repeated = self._tile.repeat(-(-last // self.tile_blocks), 1)
        noise = scratch("noise", (*words.shape[:2], size), torch.int32)
        torch.bitwise_xor(self._repeated[first:last, :size], words, out=noise)
        return noise.view(torch.float32)
