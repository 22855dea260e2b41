"""Free list: keeps unused buffers for the next request of the same size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FreeList(Generic[T]):
    """Thread-safe free list of buffers that are expensive to allocate, keyed by size.

    :meth:`take` always returns a buffer, so that no transfer waits for another's. At most ``limit``
    bytes of free buffers are kept. With ``oldest_first``, the buffer that has been free for longest
    is taken first.
    """

    def __init__(
        self, allocate: Callable[[int], T], limit: int = 1 << 28, *, oldest_first: bool = False
    ) -> None:
        self._allocate, self._limit, self._oldest_first = allocate, limit, oldest_first
        self._lock = threading.Lock()
        self._free: dict[int, deque[T]] = {}
        self.free_bytes = self.num_allocated = 0

    def take(self, size: int) -> T:
        """Return a free buffer of ``size`` bytes, or allocate one; its contents are undefined."""
        with self._lock:
            free = self._free.get(size)
            if free:
                self.free_bytes -= size
                return free.popleft() if self._oldest_first else free.pop()
            self.num_allocated += 1
        return self._allocate(size)

    def give(self, buffer: T, size: int) -> bool:
        """Give back an unused buffer of ``size`` bytes; False if it was not kept."""
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
