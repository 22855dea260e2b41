"""Room for what a rank publishes: as many tensors as are being read at once, and one more."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

import torch

from asyncddp.memory.recycling import empty
from asyncddp.memory.shared import Arena, Chunk, Place, full_fence
from asyncddp.windows.contract import Buffer, Outgoing

__all__ = ["Pool", "Regions"]

_SMALL = 1 << 24  # bytes below which tensors share a chunk: each chunk is an open file or two
_NOWHERE = Place(0, 0, 0)  # of tensors without elements


class Regions:
    """Parts of chunks that many share, used again by those who ask for the same size.

    Args:
        arena: Gives the chunks.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[Chunk, int]]] = {}

    def take(self, size: int) -> tuple[Chunk, int]:
        """Take so many bytes, all zero; the chunk, and where in it they begin."""
        with self._lock:
            waiting = self._free.get(size)
            if not waiting:
                return self.arena.reserve(size)
            chunk, offset = waiting.pop()
        chunk.raw(offset, size)[:] = bytes(size)
        return chunk, offset

    def give_back(self, size: int, region: tuple[Chunk, int]) -> None:
        """Need them no more; nor does any peer."""
        with self._lock:
            self._free.setdefault(size, []).append(region)


class Pool:
    """The buffers of one window on one rank.

    Args:
        regions: Memory that peers see; None where there is no such peer.
        shape: Of the tensors.
        dtype: Of the tensors.

    Attributes:
        edges: Those whose buffers must be left alone.
        buffers: All that were ever needed.
    """

    def __init__(self, regions: Regions | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._regions, self._shape, self._dtype = regions, shape, dtype
        self._size = math.prod(shape) * dtype.itemsize
        self._taken: list[tuple[Buffer, tuple[Chunk, int]]] = []
        self.edges: list[Outgoing] = []
        self.buffers: list[Buffer] = []

    def room(self) -> Buffer:
        """A buffer that nobody reads, a new one if need be; it is held until dropped.

        Raises:
            OSError: The system gives no more memory that peers see.
        """
        full_fence()  # between the newest versions and what readers say that they hold
        busy: list[Buffer] = []
        for edge in self.edges:
            busy += edge.in_use()
        with Buffer.counting:
            for buffer in self.buffers:
                if not buffer.holds and buffer not in busy:
                    buffer.holds = 1
                    return buffer
        buffer = self._new()
        buffer.holds = 1
        self.buffers.append(buffer)
        return buffer

    def close(self, held: Iterable[Buffer] = ()) -> None:
        """Give all of it back but what is held; no peer reads any of it any more."""
        for buffer in held:
            buffer.drop()
        if self._regions is not None:
            for buffer, region in self._taken:
                if not buffer.holds:
                    self._regions.give_back(self._size, region)
        self._regions = None
        self._taken.clear()
        self.edges, self.buffers = [], []

    def _new(self) -> Buffer:
        if not self._size:
            return Buffer(torch.empty(self._shape, dtype=self._dtype, device="cpu"), _NOWHERE)
        if self._regions is None:
            return Buffer(empty(self._shape, self._dtype), None)
        if self._size < _SMALL:
            chunk, offset = self._regions.take(self._size)
            tensor = chunk.tensor(offset, self._shape, self._dtype)
            buffer = Buffer(tensor, Place(chunk.descriptor, chunk.size, offset))
            self._taken.append((buffer, (chunk, offset)))
            return buffer
        arena = self._regions.arena
        tensor = arena.empty(self._shape, self._dtype)
        place = arena.locate(tensor)
        if place is None:
            raise OSError("no more memory can be shared with the ranks of this machine")
        return Buffer(tensor, place)
