"""Memory that the ranks of one machine see alike: anonymous files, mapped by each of them.

A chunk has no name in any file system. Its owner opens it, peers open it again through the owner's
entry in ``/proc``, and the system frees it with the last process that maps it, however that ends:
nothing can be left behind, and the size of ``/dev/shm`` does not matter.

Many tensors share a chunk of 64 MiB, and what is freed is used again for tensors of any size. So a
process has one open file (two, counting the mapping's) for each 64 MiB and for each larger tensor
that it has used at a time, and of what is free no more than 1 GiB keeps its pages.
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

from asyncddp.memory.buddy_allocator import Block, BuddyAllocator
from asyncddp.memory.modes import normal_mode

__all__ = ["ORDERED", "Arena", "Chunk", "Place", "View", "fence", "full_fence", "place_of"]

_fence_lock = threading.Lock()
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether other processors see what this one writes in the order in which it is written."""
_CHUNK = 1 << 26  # bytes that small tensors share
_LIMIT = 1 << 30  # bytes of free memory that keep their pages at most


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
        return _over(self.memory[offset:end], shape, dtype)


class Chunk(View):
    """A chunk of one's own.

    Args:
        size: Bytes.

    Attributes:
        descriptor: The open file, by whose number peers find it.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("asyncddp", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        super().__init__(self.descriptor, size)

    def drop(self, offset: int, size: int) -> bool:
        """Give pages back; they read as zero from then on, here and at the peers.

        Returns:
            Whether it could: a part of a page stays.
        """
        if size >= mmap.PAGESIZE:
            self._map.madvise(mmap.MADV_REMOVE, offset, size)
        return size >= mmap.PAGESIZE

    def close(self) -> None:
        """Let no more peers map it."""
        os.close(self.descriptor)


def place_of(block: Block[Chunk]) -> Place:
    """Where a block lies, for another process."""
    return Place(block.chunk.descriptor, block.chunk.size, block.offset)


class Arena:
    """All memory that this process shares, and what it has mapped of its peers'.

    Args:
        limit: Bytes of free memory that keep their pages at most.

    Example:
        >>> arena = Arena()
        >>> tensor = arena.empty((4,), torch.float32)
        >>> place = arena.locate(tensor)
        >>> _ = tensor.fill_(7.0)
        >>> arena.open(os.getpid(), place).tensor(place.offset, (4,), torch.float32)
        tensor([7., 7., 7., 7.])
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._lock = threading.Lock()
        self._blocks: BuddyAllocator[Chunk] = BuddyAllocator(
            self._add, _dropped, chunk=_CHUNK, limit=limit
        )
        self._addresses: list[int] = []
        self._chunks: list[Chunk] = []
        self._foreign: dict[tuple[int, int], View] = {}

    @property
    def waiting(self) -> int:
        """Bytes of free memory that may hold pages."""
        return self._blocks.waiting

    def take(self, size: int, zeroed: int = 0) -> Block[Chunk]:
        """Take bytes with whatever they hold, until they are given back.

        Args:
            size: How many at least.
            zeroed: How many of them, from the first one on, are zero.

        Raises:
            OSError: The system gives no more such memory.
        """
        block = self._blocks.take(size)
        block.chunk.memory[block.offset : block.offset + zeroed] = 0
        return block

    def give(self, block: Block[Chunk]) -> None:
        """Give bytes back that neither this process nor any peer uses any more."""
        self._blocks.give(block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a contiguous tensor with whatever values its memory holds.

        Its memory is used again once nothing refers to the tensor any more. Where the system gives
        no more shared memory it is an ordinary tensor.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._blocks.take(size)
        except OSError:  # too many open files, say: then nobody reads it where it lies
            with normal_mode():
                return torch.empty(shape, dtype=dtype, device="cpu")
        lent = block.chunk.memory[block.offset : block.offset + size]
        weakref.finalize(lent, self._blocks.give, block).atexit = False
        return _over(lent, shape, dtype)

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
        self._blocks.clear()
        with self._lock:
            for chunk in self._chunks:
                chunk.close()
            self._chunks.clear()
            self._addresses.clear()
            self._foreign.clear()

    def _make(self, size: int) -> Chunk:
        return Chunk(size)

    def _add(self, size: int) -> Chunk:
        chunk = self._make(size)
        with self._lock:
            index = bisect.bisect(self._addresses, chunk.address)
            self._chunks.insert(index, chunk)
            self._addresses.insert(index, chunk.address)
        return chunk


def _dropped(chunk: Chunk, offset: int, size: int) -> bool:
    """Give pages of a chunk back, each kind of chunk in its way."""
    return chunk.drop(offset, size)


def _over(
    memory: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over bytes that are there."""
    with normal_mode():
        return torch.from_numpy(memory).view(dtype).view(shape)
