"""Pool of pinned host buffers for copies to and from a device, since pinning is expensive."""

from __future__ import annotations

import threading

import torch

from asyncddp.device.streams import DeviceStreams


class PinnedMemoryPool:
    """Pool of free pinned host buffers for copies to and from one device.

    It never refuses a buffer, so that no transfer waits for another one's; it keeps at most
    ``limit`` bytes of free buffers.

    Args:
        streams: Of the device.
        limit: Most bytes of free buffers.

    Example:
        >>> from asyncddp.device.simulated_streams import SimulatedStreams
        >>> pool = PinnedMemoryPool(SimulatedStreams(), limit=1 << 20)
        >>> buffer = pool.take(4096)
        >>> address = buffer.data_ptr()
        >>> pool.give(buffer)
        True
        >>> pool.free_bytes, pool.take(4096).data_ptr() == address
        (4096, True)
    """

    def __init__(self, streams: DeviceStreams, limit: int = 1 << 28) -> None:
        self._make, self._limit = streams.allocate_pinned, limit
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.free_bytes = 0
        self.num_allocated = 0
        """Number of buffers allocated so far."""

    def take(self, size: int) -> torch.Tensor:
        """Take a buffer of ``size`` bytes, uninitialised."""
        with self._lock:
            free = self._free.get(size)
            if free:
                self.free_bytes -= size
                return free.pop()
            self.num_allocated += 1
        return self._make(size)

    def give(self, buffer: torch.Tensor) -> bool:
        """Return a buffer that nothing uses any more to the pool; False if it was not kept."""
        with self._lock:
            kept = self.free_bytes + buffer.nbytes <= self._limit
            if kept:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
                self.free_bytes += buffer.nbytes
            return kept
