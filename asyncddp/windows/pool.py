"""Room for what a rank publishes: as many tensors as are being read at once, and one more."""

from __future__ import annotations

import torch

from asyncddp.memory.allocate import empty
from asyncddp.memory.shared import Arena, Place, full_fence
from asyncddp.windows.contract import Buffer, Outgoing

__all__ = ["Pool"]

_NOWHERE = Place(0, 0, 0)  # of tensors without elements


class Pool:
    """The buffers of one window on one rank.

    Args:
        arena: Memory that peers see; None where there is no such peer.
        shape: Of the tensors.
        dtype: Of the tensors.

    Attributes:
        edges: Those whose buffers must be left alone.
        buffers: All that were ever needed.
    """

    def __init__(self, arena: Arena | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._arena, self._shape, self._dtype = arena, shape, dtype
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

    def close(self) -> None:
        """Let go of all of it, which no peer reads any more; what is still in use stays."""
        self._arena = None
        self.edges, self.buffers = [], []

    def _new(self) -> Buffer:
        if self._arena is None:
            return Buffer(empty(self._shape, self._dtype), None)
        tensor = self._arena.empty(self._shape, self._dtype)
        place = self._arena.locate(tensor) if tensor.numel() else _NOWHERE
        if place is None:
            raise OSError("no more memory can be shared with the ranks of this machine")
        return Buffer(tensor, place)
