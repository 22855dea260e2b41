"""Room for what a rank publishes: as many tensors as are being read at once, and one more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from asyncddp.memory.recycling import empty
from asyncddp.memory.shared import Arena
from asyncddp.windows.contract import Buffer

__all__ = ["Pool"]


class Pool:
    """The buffers of one window on one rank.

    Args:
        arena: Memory that peers see; None where there is no such peer.
        shape: Of the tensors.
        dtype: Of the tensors.
        in_use: Gives the buffers that must be left alone.

    Attributes:
        buffers: All that were ever needed.
    """

    def __init__(
        self,
        arena: Arena | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        in_use: Callable[[], Iterable[Buffer]],
    ) -> None:
        self._arena, self._shape, self._dtype = arena, shape, dtype
        self._in_use = in_use
        self.buffers: list[Buffer] = []

    def room(self) -> Buffer:
        """A buffer that nobody reads, a new one if need be; it is held until dropped.

        Raises:
            OSError: The system gives no more memory that peers see.
        """
        busy = {id(buffer) for buffer in self._in_use()}
        with Buffer.counting:
            for buffer in self.buffers:
                if not buffer.holds and id(buffer) not in busy:
                    buffer.holds = 1
                    return buffer
        buffer = self._new()
        buffer.holds = 1
        self.buffers.append(buffer)
        return buffer

    def _new(self) -> Buffer:
        if self._arena is None:
            return Buffer(empty(self._shape, self._dtype), None)
        tensor = self._arena.empty(self._shape, self._dtype)
        place = self._arena.locate(tensor)
        if place is None:
            raise OSError("no more memory can be shared with the ranks of this machine")
        return Buffer(tensor, place)
