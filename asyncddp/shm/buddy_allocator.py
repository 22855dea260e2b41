"""Buddy allocator: splits large chunks of memory into blocks, and merges free blocks.

The size of a block is a power of two bytes. Two free halves of a block are merged into that block,
so that memory that was allocated in one size is available in every other size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

C = TypeVar("C")
_BlockAddress: TypeAlias = tuple[int, int]
"""Address of a block: number of its chunk, and offset in it, a multiple of the block's size."""
_MIN_BLOCK_BYTES = 64  # a cache line


@dataclass(slots=True)
class AllocatedBlock(Generic[C]):
    """Allocated block of memory: its chunk, offset and size."""

    chunk: C
    number: int  # of the chunk
    offset: int  # of the block in the chunk
    size: int  # in bytes, a power of two
    used: int  # bytes from its start on that may have been written


class BuddyAllocator(Generic[C]):
    """Buddy allocator: allocates blocks of power-of-two sizes in large chunks of memory.

    Args:
        make: Allocates a chunk of a given number of bytes; may raise.
        release: Returns pages of a chunk (chunk, offset, bytes) to the system; False if it cannot.
        chunk: Bytes of a chunk, a power of two; larger blocks get a chunk of their own.
        limit: Maximum number of free bytes that keep their pages.
    """

    def __init__(
        self,
        make: Callable[[int], C],
        release: Callable[[C, int, int], bool],
        *,
        chunk: int,
        limit: int,
    ) -> None:
        self._make, self._release = make, release
        self._chunk, self._limit = chunk, limit
        self._lock = threading.Lock()
        self._given: deque[AllocatedBlock[C]] = deque()
        self._free: dict[int, dict[_BlockAddress, int]] = {}  # by size: used bytes of free blocks
        self.chunks: list[C | None] = []  # by number; None for those that were cleared
        self.free_bytes = 0  # which may hold pages

    def take(self, size: int) -> AllocatedBlock[C]:
        """Allocate a block of at least ``size`` bytes, uninitialised."""
        rounded = max(_MIN_BLOCK_BYTES, 1 << max(0, size - 1).bit_length())
        with self._lock:
            self._insert_freed()
            if rounded not in self._free:
                self._merge_buddies()
                self._split(rounded)
            address = next(reversed(self._free[rounded]))
            used = self._remove(rounded, address)
            chunk = cast("C", self.chunks[address[0]])  # one that was given up has no free blocks
            return AllocatedBlock(chunk, *address, rounded, max(used, size))

    def give(self, block: AllocatedBlock[C]) -> None:
        """Free a block; never blocks, so that finalizers may call it in any thread."""
        self._given.append(block)
        if self._lock.acquire(blocking=False):  # else whoever holds it, or the next one, settles
            try:
                self._insert_freed()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Drop all chunks; blocks in use keep their chunks alive, but are not reused."""
        with self._lock:
            self._free.clear()
            self.chunks = [None] * len(self.chunks)
            self.free_bytes = 0

    def _insert_freed(self) -> None:
        while self._given:
            block = self._given.popleft()
            if self.chunks[block.number] is not None:
                self._insert(block.size, (block.number, block.offset), block.used)
        if self.free_bytes > self._limit:
            self._trim()

    def _split(self, size: int) -> None:
        """Split the smallest free block that is large enough, or a new chunk, down to ``size``."""
        larger = min((free for free in self._free if free >= size), default=0)
        if not larger:
            larger = max(size, self._chunk)
            chunk = self._make(larger)
            self._insert(larger, (len(self.chunks), 0), 0)
            self.chunks.append(chunk)
        address = next(reversed(self._free[larger]))
        used = self._remove(larger, address)
        number, offset = address
        while larger > size:
            larger //= 2
            self._insert(larger, (number, offset + larger), max(0, used - larger))
            used = min(used, larger)
        self._insert(size, address, used)

    def _merge_buddies(self) -> None:
        size = min(self._free, default=0)
        while size and size <= max(self._free):
            for number, offset in sorted(self._free.get(size, ())):
                other = number, offset + size
                if offset % (2 * size) == 0 and other in self._free.get(size, ()):
                    right, left = self._remove(size, other), self._remove(size, (number, offset))
                    self._insert(2 * size, (number, offset), size + right if right else left)
            size *= 2

    def _trim(self) -> None:
        """Return the pages of all free blocks to the system."""
        self._merge_buddies()
        for size, free in list(self._free.items()):
            for address, used in list(free.items()):
                chunk = self.chunks[address[0]]
                if used and chunk is not None and self._release(chunk, address[1], size):
                    self._remove(size, address)
                    self._insert(size, address, 0)

    def _insert(self, size: int, address: _BlockAddress, used: int) -> None:
        self._free.setdefault(size, {})[address] = used
        self.free_bytes += used

    def _remove(self, size: int, address: _BlockAddress) -> int:
        free = self._free[size]
        used = free.pop(address)
        if not free:
            del self._free[size]
        self.free_bytes -= used
        return used
