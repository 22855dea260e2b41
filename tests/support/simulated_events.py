"""Events of device streams that are simulated on the CPU, within and between processes."""

from __future__ import annotations

import os
from collections.abc import Callable

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.serialization import pack, unpack
from asyncddp.shm.arena import Arena, SharedMemoryHandle, handle_of_block, store_fence
from tests.support.simulated_queues import SimulatedTaskQueues


class SimulatedEvent:
    """An event recorded on a simulated stream of this process."""

    def __init__(self, owner: SimulatedTaskQueues, role: StreamRole) -> None:
        self.owner, self.role = owner, role
        self.reached = False

    def reach(self) -> None:
        """Mark the event as reached."""
        self.reached = True

    def done(self) -> bool:
        """Return whether the event was reached; each query advances its stream."""
        if not self.reached:
            self.owner.advance(self.role)
        return self.reached


class ImportedSimulatedEvent:
    """A simulated stream's event, of this or another process, queried through shared memory.

    Two counters hold how often it was recorded, and which recording was reached last.

    Args:
        words: The counters.
        ask: Called at each query.
    """

    def __init__(self, words: memoryview, ask: Callable[[], None]) -> None:
        self._words, self._ask = words, ask

    @classmethod
    def open(cls, arena: Arena, handle: bytes, ask: Callable[[], None]) -> ImportedSimulatedEvent:
        """Open the event of a handle."""
        process, location = unpack(handle, tuple[int, SharedMemoryHandle], "an event")
        return cls(arena.open(process, location).words(location.offset, 2), ask)

    def done(self) -> bool:
        """Return whether the last recording was reached."""
        self._ask()
        return self._words[1] >= self._words[0]

    def present_recording(self) -> Callable[[], bool]:
        """Make a function that tells whether the present recording was reached."""
        words, number = self._words, self._words[0]
        return lambda: words[1] >= number


class InterprocessSimulatedEvent(ImportedSimulatedEvent):
    """A simulated event of this process that can be exported to other processes.

    Args:
        owner: Queues of the streams on which it is recorded.
        arena: Shared memory.
    """

    def __init__(self, owner: SimulatedTaskQueues, arena: Arena) -> None:
        block = arena.take(16)
        self._owner, self._role = owner, StreamRole.COMPUTE
        super().__init__(block.chunk.words(block.offset, 2), lambda: owner.advance(self._role))
        self._words[0] = self._words[1] = 0
        self.handle = pack((os.getpid(), handle_of_block(block)))

    def record(self, role: StreamRole) -> None:
        """Record the event on a stream."""
        self._role, number = role, self._words[0] + 1
        self._words[0] = number

        def reach() -> None:
            """Mark this recording as reached, for all processes."""
            store_fence()
            self._words[1] = number

        self._owner.later(role, reach, quick=True)
