"""Memory that the threads of one process see alike, with the interface of shared memory."""

from __future__ import annotations

import itertools

from asyncddp.memory.shared import Arena, Chunk, Place, View

__all__ = ["PrivateArena"]

_numbers = itertools.count()


class _PrivateChunk(Chunk):
    """Memory of this process alone, found by its number."""

    def __init__(self, size: int) -> None:
        self.descriptor = next(_numbers)
        View.__init__(self, -1, size)
        self.filled = True

    def drop(self) -> None:
        """Keep the pages: not every system can give back those of such memory."""

    def close(self) -> None:
        """There is nothing to close."""


class PrivateArena(Arena):
    """An arena for ranks that are threads of one process; works on every system.

    Example:
        >>> import torch
        >>> arena = PrivateArena()
        >>> tensor = arena.empty((2,), torch.float32).fill_(3.0)
        >>> place = arena.locate(tensor)
        >>> arena.open(0, place).tensor(place.offset, (2,), torch.float32)
        tensor([3., 3.])
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbered: dict[int, Chunk] = {}

    def open(self, process: int, place: Place) -> View:
        """Find the chunk itself."""
        del process
        return self._numbered[place.descriptor]

    def close(self) -> None:
        """Let go of everything; tensors that are still in use keep their memory."""
        super().close()
        self._numbered.clear()

    def _make(self, size: int) -> Chunk:
        chunk = _PrivateChunk(size)
        self._numbered[chunk.descriptor] = chunk
        return chunk
