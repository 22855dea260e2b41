"""Pinned host memory that is used again: to pin a page costs far more than to copy it."""

from __future__ import annotations

import threading

import torch

from asyncddp.memory.streams import DeviceStreams

__all__ = ["PinnedPool"]


class PinnedPool:
    """Pinned buffers of one device that wait to be used again.

    It never refuses a buffer, so that no transfer waits for another one's; it keeps no more than
    ``limit`` bytes of those that are free.

    Args:
        streams: Of the device.
        limit: Bytes that may wait at most.

    Example:
        >>> from asyncddp.memory.streams_host import HostStreams
        >>> pool = PinnedPool(HostStreams(), limit=1 << 20)
        >>> buffer = pool.take(4096)
        >>> address = buffer.data_ptr()
        >>> pool.give(buffer)
        True
        >>> pool.waiting, pool.take(4096).data_ptr() == address
        (4096, True)
    """

    def __init__(self, streams: DeviceStreams, limit: int = 1 << 28) -> None:
        self._make, self._limit = streams.pinned, limit
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.waiting = 0
        self.made = 0
        """Buffers that were made so far."""

    def take(self, size: int) -> torch.Tensor:
        """A buffer of so many bytes, with whatever they hold."""
        with self._lock:
            free = self._free.get(size)
            if free:
                self.waiting -= size
                return free.pop()
            self.made += 1
        return self._make(size)

    def give(self, buffer: torch.Tensor) -> bool:
        """Nothing uses a buffer any more, on the device or on the wire; whether it is kept."""
        with self._lock:
            kept = self.waiting + buffer.nbytes <= self._limit
            if kept:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
                self.waiting += buffer.nbytes
            return kept
