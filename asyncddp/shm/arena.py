"""Arena: allocates shared memory in anonymous files, which other processes of the machine map.

A chunk of memory has no name in any file system: peers open it through its owner's entry in
``/proc``, and the system frees it with the last process that maps it, however that process ends.
So nothing can be left behind, and the size of ``/dev/shm`` does not matter.

A process has one open file (two, counting the mapping's) for each 64 MiB, which many tensors share,
and for each larger tensor. At most 1 GiB of free memory keeps its pages.
"""

from __future__ import annotations

import bisect
import itertools
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

from asyncddp.shm.buddy_allocator import AllocatedBlock, BuddyAllocator
from asyncddp.torch_modes import normal_mode

STORES_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""True if this processor's stores become visible to others in program order (x86)."""
_fence_lock = threading.Lock()
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_private_numbers = itertools.count()
_FILE_BITS = 31  # of a file descriptor
_CHUNK = 1 << 26  # bytes that small tensors share
_LIMIT = 1 << 30  # bytes of free memory that keep their pages at most


def store_fence() -> None:
    """Store fence: earlier stores become visible to other processors before later stores."""
    if not STORES_ORDERED:
        full_memory_fence()


def full_memory_fence() -> None:
    """Full memory fence: earlier stores become visible to other processors before later loads."""
    for _ in range(1 if STORES_ORDERED else 2):
        with _fence_lock:
            pass


class SharedMemoryHandle(NamedTuple):
    """Handle that lets another process map shared memory: file, size and offset.

    Above the file descriptor are bits of its inode number. They differ for a later file with the
    same descriptor, also in a later process with the same process id.
    """

    descriptor: int
    size: int
    offset: int


class MappedChunk:
    """Chunk of memory mapped into this process: views of it as words, bytes and tensors."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map, self.size = mapping, len(mapping)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.address: int = self.memory.ctypes.data

    def words(self, offset: int, count: int) -> memoryview:
        """Return a view of ``count`` 64-bit words, each read and written atomically."""
        return memoryview(self._map)[offset : offset + 8 * count].cast("Q")

    def raw(self, offset: int, size: int) -> memoryview:
        """Return a view of ``size`` bytes at ``offset``."""
        return memoryview(self._map)[offset : offset + size]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose data are the bytes at ``offset``."""
        end = offset + math.prod(shape) * dtype.itemsize
        return _tensor_over(self.memory[offset:end], shape, dtype)


class OwnedChunk(MappedChunk):
    """Chunk of shared memory that this process has allocated, as an anonymous file."""

    _unneeded: int | None = getattr(mmap, "MADV_REMOVE", None)  # the advice for unused pages

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("asyncddp", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self.descriptor = (_inode(self._file) << _FILE_BITS) + self._file
        super().__init__(mmap.mmap(self._file, size))

    def drop(self, offset: int, size: int) -> bool:
        """Return pages to the system, False if that is impossible; shared pages are then zero."""
        if self._unneeded is None or size < mmap.PAGESIZE:
            return False
        self._map.madvise(self._unneeded, offset, size)
        return True

    def close(self) -> None:
        """Close the file, so that no further peer can map it."""
        os.close(self._file)


def handle_of_block(block: AllocatedBlock[OwnedChunk]) -> SharedMemoryHandle:
    """Make the handle that lets another process map a block."""
    return SharedMemoryHandle(block.chunk.descriptor, block.chunk.size, block.offset)


class Arena:
    """Arena that allocates this process's shared memory, and maps the shared memory of peers.

    Free memory beyond ``limit`` bytes is returned to the system.
    """

    _chunk_type = OwnedChunk

    def __init__(self, limit: int = _LIMIT) -> None:
        self._lock = threading.Lock()
        self._blocks: BuddyAllocator[OwnedChunk] = BuddyAllocator(
            self._add, lambda chunk, *part: chunk.drop(*part), chunk=_CHUNK, limit=limit
        )
        self._addresses: list[int] = []
        self._chunks: list[OwnedChunk] = []
        self._foreign: dict[tuple[int, int], MappedChunk] = {}

    def take(self, size: int, zeroed: int = 0) -> AllocatedBlock[OwnedChunk]:
        """Allocate a block of at least ``size`` bytes, the first ``zeroed`` of which are zero."""
        block = self._blocks.take(size)
        block.chunk.memory[block.offset : block.offset + zeroed] = 0
        return block

    def give(self, block: AllocatedBlock[OwnedChunk]) -> None:
        """Free a block that is unused by this process and all peers."""
        self._blocks.give(block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous, uninitialised tensor in shared memory, freed with the tensor.

        If the system has no shared memory left, the tensor lies in private memory.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._blocks.take(size)
        except OSError:  # too many open files, say: then peers cannot read it in place
            with normal_mode():
                return torch.empty(shape, dtype=dtype, device="cpu")
        memory = block.chunk.memory[block.offset : block.offset + size]
        weakref.finalize(memory, self._blocks.give, block).atexit = False
        return _tensor_over(memory, shape, dtype)

    def locate(self, tensor: torch.Tensor) -> SharedMemoryHandle | None:
        """Return the handle of a contiguous tensor's memory; None if it is not in this arena."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            chunk = self._chunks[index]
        offset = address - chunk.address
        if offset + tensor.nbytes > chunk.size:
            return None
        return SharedMemoryHandle(chunk.descriptor, chunk.size, offset)

    def open(self, process: int, handle: SharedMemoryHandle) -> MappedChunk:
        """Map a peer's chunk, or return the mapping; OSError if the peer or its chunk is gone."""
        key = (process, handle.descriptor)
        inode, file = divmod(handle.descriptor, 1 << _FILE_BITS)
        with self._lock:
            view = self._foreign.get(key)
            if view is None:
                descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
                try:
                    if _inode(descriptor) != inode:
                        raise FileNotFoundError(f"process {process} has freed that memory")
                    mapping = mmap.mmap(descriptor, handle.size)
                finally:
                    os.close(descriptor)
                view = self._foreign[key] = MappedChunk(mapping)
            return view

    def close(self) -> None:
        """Free all chunks and unmap those of peers; tensors in use keep their memory."""
        self._blocks.clear()
        with self._lock:
            for chunk in self._chunks:
                chunk.close()
            self._chunks.clear()
            self._addresses.clear()
            self._foreign.clear()

    def _add(self, size: int) -> OwnedChunk:
        chunk = self._chunk_type(size)
        with self._lock:
            index = bisect.bisect(self._addresses, chunk.address)
            self._chunks.insert(index, chunk)
            self._addresses.insert(index, chunk.address)
        return chunk


class _PrivateChunk(OwnedChunk):
    """Chunk of private memory of this process; a forked process gets a copy."""

    _unneeded = getattr(mmap, "MADV_DONTNEED", None)

    def __init__(self, size: int) -> None:
        self.descriptor = next(_private_numbers)
        MappedChunk.__init__(self, mmap.mmap(-1, size, **_PRIVATE))
        if _HUGE is not None:
            self._map.madvise(_HUGE)

    def close(self) -> None:
        """Do nothing: there is no file to close."""


class InProcessArena(Arena):
    """Arena in private memory, for ranks that are threads of one process.

    Example:
        >>> arena = InProcessArena()
        >>> tensor = arena.empty((2,), torch.float32).fill_(3.0)
        >>> place = arena.locate(tensor)
        >>> arena.open(0, place).tensor(place.offset, (2,), torch.float32)
        tensor([3., 3.])
    """

    _chunk_type = _PrivateChunk

    def open(self, process: int, handle: SharedMemoryHandle) -> MappedChunk:
        """Return the chunk that a handle belongs to."""
        with self._lock:
            return next(chunk for chunk in self._chunks if chunk.descriptor == handle.descriptor)


def _inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino % (1 << 32)


def _tensor_over(
    memory: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    with normal_mode():
        return torch.from_numpy(memory).view(dtype).view(shape)
