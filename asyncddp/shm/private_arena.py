"""Arena of process-private memory for ranks that are threads, in place of shared memory."""

from __future__ import annotations

import itertools
import mmap

import numpy as np

from asyncddp.shm.arena import Arena, MappedChunk, OwnedChunk, SharedMemoryHandle

_numbers = itertools.count()


class _PrivateChunk(OwnedChunk):
    """A chunk of anonymous memory of this process; a forked process gets a copy."""

    def __init__(self, size: int) -> None:
        self.descriptor = next(_numbers)
        self.size = size
        self._map = mmap.mmap(-1, size, **_PRIVATE)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        if _HUGE is not None:
            self._map.madvise(_HUGE)

    def drop(self, offset: int, size: int) -> bool:
        """Return pages to the system, where it supports that."""
        if _UNNEEDED is None or size < mmap.PAGESIZE:
            return False
        self._map.madvise(_UNNEEDED, offset, size)
        return True

    def close(self) -> None:
        """Do nothing: there is no file to close."""


class PrivateArena(Arena):
    """Arena of private memory, shared by ranks that are threads; works on every system.

    Example:
        >>> import torch
        >>> arena = PrivateArena()
        >>> tensor = arena.empty((2,), torch.float32).fill_(3.0)
        >>> place = arena.locate(tensor)
        >>> arena.open(0, place).tensor(place.offset, (2,), torch.float32)
        tensor([3., 3.])
    """

    def open(self, process: int, handle: SharedMemoryHandle) -> MappedChunk:
        """Return the chunk of a handle."""
        del process
        with self._lock:
            return next(chunk for chunk in self._chunks if chunk.descriptor == handle.descriptor)

    def _make(self, size: int) -> OwnedChunk:
        return _PrivateChunk(size)


_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_UNNEEDED: int | None = getattr(mmap, "MADV_DONTNEED", None)
