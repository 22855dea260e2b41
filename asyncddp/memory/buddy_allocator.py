"""BuddyAllocator of memory cut out of large chunks by halving, and joined again when they are free.

This is buddy allocation: a block has a power of two of bytes, two free halves of one block become
that block again, and so memory that was taken in one size is there for every other size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

__all__ = ["Block", "BuddyAllocator"]

C = TypeVar("C")
_Place: TypeAlias = tuple[int, int]
"""Where a block begins: the number of the chunk, and the offset, a multiple of the block's size."""
_LEAST = 64
"""Bytes of a block at least: a line of a processor's cache."""


@dataclass(slots=True)
class Block(Generic[C]):
    """A part of a chunk that is in use.

    Attributes:
        chunk: The chunk.
        number: How many chunks were made before it.
        offset: Where in it the block begins.
        size: Bytes, a power of two.
        used: Bytes from its start on that may have been written.
    """

    chunk: C
    number: int
    offset: int
    size: int
    used: int


class BuddyAllocator(Generic[C]):
    """All chunks of one kind of memory, and what is free in them.

    Args:
        make: Makes a chunk of so many bytes; it may raise.
        release: Gives the pages of a part of a chunk back to the system: chunk, offset, bytes.
            Whether the system took them.
        chunk: Bytes of a chunk, a power of two; what does not fit gets a chunk of its own.
        limit: Free bytes that keep their pages at most.
        forget: Whether a chunk that is free as a whole is given up beyond the limit.

    Attributes:
        chunks: All that were made, by number; None for those that were given up.
        waiting: Bytes of free memory that may hold pages.

    Example:
        >>> pages = lambda chunk, offset, size: True
        >>> blocks = BuddyAllocator(bytearray, pages, chunk=1024, limit=512)
        >>> first, second = blocks.take(100), blocks.take(300)
        >>> (first.offset, first.size), (second.offset, second.size)
        ((0, 128), (512, 512))
        >>> blocks.give(first)
        >>> blocks.give(second)
        >>> blocks.take(1000).offset, len(blocks.chunks)
        (0, 1)
    """

    def __init__(
        self,
        make: Callable[[int], C],
        release: Callable[[C, int, int], bool],
        *,
        chunk: int,
        limit: int,
        forget: bool = False,
    ) -> None:
        self._make, self._release = make, release
        self._chunk, self._limit, self._forget = chunk, limit, forget
        self._lock = threading.Lock()
        self._given: deque[Block[C]] = deque()
        self._free: dict[int, dict[_Place, int]] = {}  # by size: bytes used of each free block
        self._sizes: list[int] = []
        self.chunks: list[C | None] = []
        self.waiting = 0

    def take(self, size: int) -> Block[C]:
        """Take at least so many bytes, with whatever they hold.

        Raises:
            OSError: The system gives no more memory of this kind.
        """
        rounded = max(_LEAST, 1 << max(0, size - 1).bit_length())
        with self._lock:
            self._settle()
            if rounded not in self._free:
                self._join()
                self._divide(rounded)
            place, used = self._free[rounded].popitem()
            self.waiting -= used
            if not self._free[rounded]:
                del self._free[rounded]
            chunk = cast("C", self.chunks[place[0]])  # one that was given up has no free blocks
            return Block(chunk, *place, rounded, max(used, size))

    def give(self, block: Block[C]) -> None:
        """A block is not used any more; any thread, and a finalizer at any time, may say so."""
        self._given.append(block)
        if self._lock.acquire(blocking=False):  # else whoever holds it, or the next one, settles
            try:
                self._settle()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Give up all chunks; blocks in use keep theirs, and do not come back."""
        with self._lock:
            self._free.clear()
            self.chunks = [None] * len(self.chunks)
            self.waiting = 0

    def _settle(self) -> None:
        """Take what was given back."""
        while self._given:
            block = self._given.popleft()
            if self.chunks[block.number] is not None:
                self._insert(block.size, (block.number, block.offset), block.used)
        if self.waiting > self._limit:
            self._trim()

    def _divide(self, size: int) -> None:
        """Halve the smallest block that is large enough, in a new chunk if need be."""
        larger = min((free for free in self._free if free >= size), default=0)
        if not larger:
            larger = max(size, self._chunk)
            chunk = self._make(larger)
            self._insert(larger, (len(self.chunks), 0), 0)
            self.chunks.append(chunk)
            self._sizes.append(larger)
        place = next(reversed(self._free[larger]))
        used = self._remove(larger, place)
        number, offset = place
        while larger > size:
            larger //= 2
            self._insert(larger, (number, offset + larger), max(0, used - larger))
            used = min(used, larger)
        self._insert(size, place, used)

    def _join(self) -> None:
        """Make one block of two halves wherever both are free."""
        size = min(self._free, default=0)
        while size and size <= max(self._free):
            for number, offset in sorted(self._free.get(size, ())):
                other = number, offset + size
                if offset % (2 * size) == 0 and other in self._free.get(size, ()):
                    right, left = self._remove(size, other), self._remove(size, (number, offset))
                    self._insert(2 * size, (number, offset), size + right if right else left)
            size *= 2

    def _trim(self) -> None:
        """Give the pages of all that is free back to the system."""
        self._join()
        for size, free in list(self._free.items()):
            for place, used in list(free.items()):
                chunk = self.chunks[place[0]]
                if self._forget and size == self._sizes[place[0]]:
                    self._remove(size, place)
                    self.chunks[place[0]] = None
                elif used and chunk is not None and self._release(chunk, place[1], size):
                    self._remove(size, place)
                    self._insert(size, place, 0)

    def _insert(self, size: int, place: _Place, used: int) -> None:
        self._free.setdefault(size, {})[place] = used
        self.waiting += used

    def _remove(self, size: int, place: _Place) -> int:
        free = self._free[size]
        used = free.pop(place)
        if not free:
            del self._free[size]
        self.waiting -= used
        return used
