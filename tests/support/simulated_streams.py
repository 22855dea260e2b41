"""Device streams simulated on the CPU, which copy late on purpose so that tests find missing waits.

A copy stays queued until its event has been queried often enough, as on a busy device. Code that
reads a tensor before it was copied, or overwrites one that has yet to be read, gets wrong values as
it would on a GPU, so that tests find missing waits. Streams wait for events of other processes as
those of a device do; what torch computes at once waits in their stead.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from asyncddp.device.stream_interfaces import (
    DeviceEvent,
    DeviceStreams,
    InterprocessEvent,
    StreamRole,
    bind_library_thread,
)
from asyncddp.serialization import pack, unpack
from asyncddp.shm.arena import Arena, SharedMemoryHandle
from asyncddp.tensors.allocation import empty
from tests.support.simulated_events import (
    ImportedSimulatedEvent,
    InterprocessSimulatedEvent,
    SimulatedEvent,
)
from tests.support.simulated_queues import SimulatedTaskQueues, _always


class SimulatedStreams(SimulatedTaskQueues, DeviceStreams):
    """Simulated streams of a device: queues of copies between CPU tensors.

    Args:
        laziness: Queries of events after which the next copy in a queue is made.
        pace: Seconds after which the next copy is made without queries, by a thread that ends when
            there is nothing left to do; never if not given.

    Attributes:
        questions: Number of queries of events.
        copied: Number of bytes copied.
        bound: How often each thread was bound, by its name.
        unbound_uses: How often each thread has used the streams before it was bound.

    Example:
        >>> streams, out = SimulatedStreams(laziness=1), torch.zeros(1)
        >>> streams.copy(out, torch.ones(1), StreamRole.DEVICE_TO_HOST)
        >>> copied = streams.record_event(StreamRole.DEVICE_TO_HOST)
        >>> float(out), copied.done(), copied.done(), float(out)
        (0.0, False, True, 1.0)
    """

    kind = "stand-in"
    device = torch.device("cpu")

    def __init__(self, laziness: int = 0, pace: float | None = None) -> None:
        super().__init__(laziness, pace)
        self._arena: Arena | None = None
        self.copied = 0
        self.bound: Counter[str] = Counter()
        self.unbound_uses: Counter[str] = Counter()

    # threads, bound as by the streams of CUDA: whatever a thread does first

    def bind_thread(self) -> None:
        """Count the binding."""
        self.bound[threading.current_thread().name] += 1

    def _note_use(self) -> None:
        bind_library_thread(self)
        name = threading.current_thread().name
        if not self.bound[name]:
            self.unbound_uses[name] += 1

    def later(
        self,
        role: StreamRole,
        work: Callable[[], None],
        ready: Callable[[], bool] = _always,
        *,
        quick: bool = False,
    ) -> None:
        """Enqueue a task on a stream, as this thread."""
        self._note_use()
        super().later(role, work, ready, quick=quick)

    def advance(self, role: StreamRole) -> None:
        """Query an event, as this thread."""
        self._note_use()
        super().advance(role)

    # events and copies

    def record_event(self, role: StreamRole) -> DeviceEvent:
        """Enqueue an event; it is reached at once on an idle stream."""
        event = SimulatedEvent(self, role)
        self.later(role, event.reach, quick=True)
        return event

    def wait_event(self, role: StreamRole, event: DeviceEvent) -> None:
        """Do now all work that precedes the event, since nothing later may come before it.

        For an event of another process the stream waits.
        """
        if isinstance(event, SimulatedEvent):
            event.owner.reach(event.role, lambda: event.reached)
        elif isinstance(event, ImportedSimulatedEvent):
            self.later(role, lambda: None, event.present_recording(), quick=True)

    @contextmanager
    def _at_once(self, role: StreamRole) -> Iterator[None]:
        self.reach(role, lambda: not self._queues[role])
        yield

    def stream_context(self, role: StreamRole) -> AbstractContextManager[None]:
        """Finish the stream's queue first, since torch computes on the host at once."""
        return self._at_once(role)

    def copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        """Enqueue a copy."""

        def copied() -> None:
            """Make the copy."""
            out.copy_(source)
            self.copied += out.nbytes

        self.later(role, copied)

    # memory

    def record_stream(self, tensor: torch.Tensor, role: StreamRole) -> None:
        """Do nothing: queued tasks hold their tensors."""

    def stream_pointer(self, role: StreamRole) -> int:
        """Return the number of the stream."""
        return list(StreamRole).index(role)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Allocate ordinary host memory."""
        return empty((size,), torch.uint8)

    def allocate_exportable(self, size: int) -> torch.Tensor:
        """Allocate shared memory, which the processes of this machine can map."""
        return self._shared().empty((size,), torch.uint8)

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        """Encode this process's id and the tensor's shared-memory handle."""
        handle = self._shared().locate(tensor)
        if handle is None:
            raise RuntimeError("expected a tensor in memory that other processes see")
        return pack((os.getpid(), tensor.untyped_storage().nbytes(), handle))

    def import_memory(self, token: bytes) -> torch.Tensor:
        """Map the other process's shared memory."""
        process, size, handle = unpack(
            token, tuple[int, int, SharedMemoryHandle], "a place in memory"
        )
        return self._shared().open(process, handle).tensor(handle.offset, (size,), torch.uint8)

    def create_interprocess_event(self) -> InterprocessEvent:
        """Create an event in shared memory."""
        return InterprocessSimulatedEvent(self, self._shared())

    def import_event(self, handle: bytes) -> DeviceEvent:
        """Map the other process's shared memory."""
        return ImportedSimulatedEvent.open(self._shared(), handle, self._note_question)

    def _note_question(self) -> None:
        self._note_use()
        self.questions += 1

    def _shared(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena
