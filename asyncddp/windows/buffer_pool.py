"""Pool of reusable buffers into which a rank copies tensors that its window publishes."""

from __future__ import annotations

import torch

from asyncddp.shm.arena import Arena, SharedMemoryHandle, full_memory_fence
from asyncddp.tensors.allocation import empty
from asyncddp.windows.edge import EdgeWriter, RefCountedBuffer

_NOWHERE = SharedMemoryHandle(0, 0, 0)  # of tensors without elements


class BufferPool:
    """Pool of the buffers in which a window publishes; a buffer is reused once no peer reads it.

    They are ordinary memory without an arena, and in use along edges.
    """

    def __init__(self, arena: Arena | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._arena, self._shape, self._dtype = arena, shape, dtype
        self.edges: list[EdgeWriter] = []
        self.buffers: list[RefCountedBuffer] = []

    def acquire_buffer(self) -> RefCountedBuffer:
        """Return a buffer that nobody reads, a new one if need be; it is held until dropped."""
        full_memory_fence()  # between the newest versions and what readers say that they hold
        busy: list[RefCountedBuffer] = []
        for edge in self.edges:
            busy += edge.in_use()
        with RefCountedBuffer.counting:
            for buffer in self.buffers:
                if not buffer.holds and buffer not in busy:
                    buffer.holds = 1
                    return buffer
        buffer = self._new()
        buffer.holds = 1
        self.buffers.append(buffer)
        return buffer

    def close(self) -> None:
        """Release all buffers, which no peer reads any more; those still in use stay."""
        self._arena = None
        self.edges, self.buffers = [], []

    def _new(self) -> RefCountedBuffer:
        if self._arena is None:
            return RefCountedBuffer(empty(self._shape, self._dtype), None)
        tensor = self._arena.empty(self._shape, self._dtype)
        place = self._arena.locate(tensor) if tensor.numel() else _NOWHERE
        if place is None:
            raise OSError("no more memory can be shared with the ranks of this machine")
        return RefCountedBuffer(tensor, place)
