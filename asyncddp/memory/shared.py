"""Memory that the ranks of one machine see alike: anonymous files, mapped by each of them.

A chunk has no name in any file system. Its owner opens it, peers open it again through the owner's
entry in ``/proc``, and the system frees it with the last process that maps it, however that ends:
nothing can be left behind, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import platform
import threading
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ORDERED", "Arena", "Chunk", "Place", "View", "fence", "full_fence"]

_ALIGNMENT = 64
_fence_lock = threading.Lock()
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether other processors see what this one writes in the order in which it is written."""
_LIMIT = 1 << 30  # bytes that wait to be used again at most


def fence() -> None:
    """Keep what was written before from being seen after what is written next.

    x86 processors do so by themselves; elsewhere a lock's instructions do it.
    """
    if not ORDERED:
        full_fence()


def full_fence() -> None:
    """Let others see what was written before anything is read next, on every processor."""
    for _ in range(1 if ORDERED else 2):
        with _fence_lock:
            pass


class Place(NamedTuple):
    """Where bytes lie, for another process: the owner's descriptor, its size, and the offset."""

    descriptor: int
    size: int
    offset: int


class View:
    """A mapped chunk.

    Args:
        descriptor: An open file, of which ``size`` bytes are mapped.
        size: How many.

    Attributes:
        memory: All bytes.
        address: Where they begin in this process.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self.memory.ctypes.data

    def words(self, offset: int, count: int) -> memoryview:
        """``count`` numbers of 64 bits; each is read and written as a whole."""
        return memoryview(self._map)[offset : offset + 8 * count].cast("Q")

    def raw(self, offset: int, size: int) -> memoryview:
        """``size`` bytes from ``offset`` on."""
        return memoryview(self._map)[offset : offset + size]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from ``offset`` on."""
        end = offset + math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self.memory[offset:end]).view(dtype).view(shape)

    def drop(self) -> None:
        """Give the pages back; the bytes read as zero from then on, here and at the peers."""
        self._map.madvise(mmap.MADV_REMOVE)


class Chunk(View):
    """A chunk of one's own.

    Args:
        size: Bytes.

    Attributes:
        descriptor: The open file, by whose number peers find it.
        filled: Whether its pages may be in use.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("asyncddp", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        super().__init__(self.descriptor, size)
        self.filled = True

    def close(self) -> None:
        """Let no more peers map it."""
        os.close(self.descriptor)


class Arena:
    """All memory that this process shares, and what it has mapped of its peers'.

    Example:
        >>> arena = Arena()
        >>> tensor = arena.empty((4,), torch.float32)
        >>> place = arena.locate(tensor)
        >>> _ = tensor.fill_(7.0)
        >>> arena.open(os.getpid(), place).tensor(place.offset, (4,), torch.float32)
        tensor([7., 7., 7., 7.])
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self._addresses: list[int] = []
        self._chunks: list[Chunk] = []
        self._free: dict[int, list[Chunk]] = {}
        self._foreign: dict[tuple[int, int], View] = {}
        self._waiting = 0
        self._closed = False
        self._room = 0
        self._shelf: Chunk | None = None

    def reserve(self, size: int) -> tuple[Chunk, int]:
        """Take bytes for good, zeroed, out of chunks that many such share.

        Returns:
            The chunk, and where in it they begin.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._shelf is None or self._room + size > self._shelf.size:
                self._shelf, self._room = self._add(max(size, 1 << 26)), 0
            offset = self._room
            self._room += size
            return self._shelf, offset

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a contiguous tensor with whatever values its memory holds.

        Its memory is used again once nothing refers to the tensor any more. Where the system gives
        no more shared memory it is an ordinary tensor.
        """
        size = max(1, math.prod(shape) * dtype.itemsize)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            waiting = self._free.get(size)
            if waiting:
                chunk = waiting.pop()
                self._waiting -= size if chunk.filled else 0
                chunk.filled = True
            else:
                try:
                    chunk = self._add(size)
                except OSError:  # too many open files, say: then nobody reads it where it lies
                    return torch.empty(shape, dtype=dtype, device="cpu")
        lent = chunk.memory[:]  # what the tensor holds on to; the chunk itself outlives it
        weakref.finalize(lent, self._back, chunk).atexit = False
        count = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(lent)[:count].view(dtype).view(shape)

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where a contiguous tensor lies, or None if its memory is not shared."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            chunk = self._chunks[index]
        offset = address - chunk.address
        if offset + tensor.nbytes > chunk.size:
            return None
        return Place(chunk.descriptor, chunk.size, offset)

    def open(self, process: int, place: Place) -> View:
        """Map a peer's chunk, or find the mapping that is there already.

        Raises:
            OSError: The peer is gone, or lives where this process cannot see it.
        """
        key = (process, place.descriptor)
        with self._lock:
            view = self._foreign.get(key)
            if view is None:
                descriptor = os.open(f"/proc/{process}/fd/{place.descriptor}", os.O_RDWR)
                try:
                    view = self._foreign[key] = View(descriptor, place.size)
                finally:
                    os.close(descriptor)
            return view

    def close(self) -> None:
        """Let go of everything; tensors that are still in use keep their memory."""
        with self._lock:
            for chunk in self._chunks:
                chunk.close()
            self._chunks.clear()
            self._addresses.clear()
            self._free.clear()
            self._foreign.clear()
            self._shelf, self._closed = None, True

    def _make(self, size: int) -> Chunk:
        return Chunk(size)

    def _add(self, size: int) -> Chunk:
        chunk = self._make(size)
        index = bisect.bisect(self._addresses, chunk.address)
        self._chunks.insert(index, chunk)
        self._addresses.insert(index, chunk.address)
        return chunk

    def _back(self, chunk: Chunk) -> None:
        with self._lock:
            if self._closed:
                return
            self._free.setdefault(chunk.size, []).append(chunk)
            self._waiting += chunk.size
            if self._waiting <= _LIMIT:
                return
            for idle in [one for chunks in self._free.values() for one in chunks if one.filled]:
                idle.drop()
                idle.filled = False
            self._waiting = 0
