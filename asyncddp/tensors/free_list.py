"""Free list: buffers that are reused for the next request of the same size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FreeList(Generic[T]):
    """Free list of buffers that are expensive to allocate, by size; usable from any thread.

    It never refuses a buffer, so that no transfer waits for another one's; at most ``limit`` bytes
    of free ones are kept. ``oldest_first`` takes the one that has been free for longest.
    """

    def __init__(
        self, allocate: Callable[[int], T], limit: int = 1 << 28, *, oldest_first: bool = False
    ) -> None:
        self._allocate, self._limit, self._oldest_first = allocate, limit, oldest_first
        self._lock = threading.Lock()
        self._free: dict[int, deque[T]] = {}
        self.free_bytes = self.num_allocated = 0

    def take(self, size: int) -> T:
        """Take a buffer of ``size`` bytes, uninitialised."""
        with self._lock:
            free = self._free.get(size)
            if free:
                self.free_bytes -= size
                return free.popleft() if self._oldest_first else free.pop()
            self.num_allocated += 1
        return self._allocate(size)

    def give(self, buffer: T, size: int) -> bool:
        """Return a buffer of ``size`` bytes that nothing uses any more; False if it is not kept."""
        with self._lock:
            kept = self.free_bytes + size <= self._limit
            if kept:
                self._free.setdefault(size, deque()).append(buffer)
                self.free_bytes += size
            return kept

    def clear(self) -> None:
        """Drop all free buffers."""
        with self._lock:
            self._free.clear()
            self.free_bytes = 0
