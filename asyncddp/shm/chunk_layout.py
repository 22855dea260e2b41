"""Layout of a ring buffer's slots: division of a tensor into chunks, and number of slots."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncddp.shm.slot_count_tuner import MANY

_DOUBLED = 1 << 20  # bytes of a tensor up to which a step need not wait for the one before it
_WHOLE = 1 << 22  # bytes of a tensor up to which it stays in one chunk
_CHUNK = 1 << 19  # bytes of a chunk of larger ones


@dataclass(frozen=True)
class ChunkLayout:
    """Division of tensors of one shape and dtype into chunks, and slots of their ring buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int  # of the tensor
    chunk_numel: int  # of a chunk; the last one may be shorter
    num_chunks: int
    num_slots: int  # chunks that a ring has room for at a time
    doubled: bool = True  # even and odd steps have slots of their own

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> ChunkLayout:
        """Choose a layout with slots that stay in a processor's cache from write to read."""
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        size = numel if nbytes <= _WHOLE else _CHUNK // dtype.itemsize
        chunk_numel = max(1, size)
        num_chunks = max(1, -(-numel // chunk_numel))
        num_slots = min(num_chunks, MANY)
        return cls(shape, dtype, numel, chunk_numel, num_chunks, num_slots, nbytes <= _DOUBLED)

    @classmethod
    def single(cls, shape: tuple[int, ...], dtype: torch.dtype) -> ChunkLayout:
        """Build the layout with the whole tensor as a single chunk."""
        numel = math.prod(shape)
        return cls(shape, dtype, numel, numel, 1, 1)

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a contiguous tensor into all of its chunks."""
        return torch.split(tensor.view(-1), self.chunk_numel)

    def chunk(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return one chunk of a flat tensor, as a view."""
        size = self.chunk_numel
        return flat if self.num_chunks == 1 else flat[number * size : (number + 1) * size]
