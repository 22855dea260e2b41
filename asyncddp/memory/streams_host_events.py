"""Events of the stand-in: of one process, and those that several processes see alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.shared import Arena, Place, fence, place_of
from asyncddp.memory.streams import Queue

if TYPE_CHECKING:
    from asyncddp.memory.streams_host import HostStreams

__all__ = ["HostEvent", "ImportedHostEvent", "InterprocessHostEvent"]


class HostEvent:
    """A place in a queue of the stand-in."""

    def __init__(self, owner: HostStreams, queue: Queue) -> None:
        self.owner, self.queue = owner, queue
        self.reached = False

    def reach(self) -> None:
        """The queue has come so far."""
        self.reached = True

    def done(self) -> bool:
        """Whether it was reached; every question brings its queue a little further."""
        if not self.reached:
            self.owner.advance(self.queue)
        return self.reached


class ImportedHostEvent:
    """An event of any process, in memory that this one has mapped.

    Two numbers tell how often it was recorded, and which of these was reached last.

    Args:
        words: The numbers.
        ask: Called when somebody asks.
    """

    def __init__(self, words: memoryview, ask: Callable[[], None]) -> None:
        self._words, self._ask = words, ask

    @classmethod
    def open(cls, arena: Arena, handle: bytes, ask: Callable[[], None]) -> ImportedHostEvent:
        """Find it by its handle."""
        process, place = unpack(handle, tuple[int, Place], "an event")
        return cls(arena.open(process, place).words(place.offset, 2), ask)

    def done(self) -> bool:
        """Whether it was reached since it was recorded last."""
        self._ask()
        return self._words[1] >= self._words[0]

    def place(self) -> Callable[[], bool]:
        """What tells whether the place was reached where it was recorded last."""
        words, number = self._words, self._words[0]
        return lambda: words[1] >= number


class InterprocessHostEvent(ImportedHostEvent):
    """An event of one's own that other processes can be shown.

    Args:
        owner: Whose queues it is recorded in.
        arena: Memory that other processes see.
    """

    def __init__(self, owner: HostStreams, arena: Arena) -> None:
        block = arena.take(16)
        self._owner, self._queue = owner, Queue.WORK
        super().__init__(block.chunk.words(block.offset, 2), lambda: owner.advance(self._queue))
        self._words[0] = self._words[1] = 0
        self.handle = pack((os.getpid(), place_of(block)))

    def record(self, queue: Queue) -> None:
        """Put it at the end of a queue."""
        self._queue, number = queue, self._words[0] + 1
        self._words[0] = number

        def reach() -> None:
            """The queue has come so far, and others may see it."""
            fence()
            self._words[1] = number

        self._owner.later(queue, reach, quick=True)
