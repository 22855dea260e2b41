"""Simulated device streams on the CPU: asynchronous copies between host tensors, done late.

A copy stays queued until its event has been queried often enough, as on a busy device. Code that
reads a tensor before it was copied, or overwrites one that has yet to be read, gets wrong values as
it would on a GPU, so that tests find missing waits. Streams wait for events of other processes as
those of a device do; what torch computes at once waits in their stead.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from asyncddp.device.simulated_events import (
    ImportedSimulatedEvent,
    InterprocessSimulatedEvent,
    SimulatedEvent,
)
from asyncddp.device.streams import DeviceEvent, DeviceStreams, InterprocessEvent, StreamRole
from asyncddp.serialization import pack, unpack
from asyncddp.shm.arena import Arena, SharedMemoryHandle
from asyncddp.tensors.allocation import empty
from asyncddp.torch_modes import normal_mode

_EVENT_TIMEOUT = 30.0  # seconds for an event of another process
_POLL_INTERVAL = 1e-4  # seconds


def _always() -> bool:
    return True


class _QueuedTask(NamedTuple):
    """A task in the queue of a simulated stream.

    Attributes:
        work: Does the task.
        ready: Tells whether it can be done.
        quick: Whether it takes no time: recording an event, or waiting for one.
    """

    work: Callable[[], None]
    ready: Callable[[], bool] = _always
    quick: bool = False


class SimulatedStreams(DeviceStreams):
    """Simulated streams of a device: queues of copies between CPU tensors.

    Args:
        laziness: Queries of events after which the next copy in a queue is made.
        pace: Seconds after which the next copy is made without queries, by a thread that ends when
            there is nothing left to do; never if not given.

    Attributes:
        questions: Number of queries of events.
        copied: Number of bytes copied.

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
        self._laziness, self._pace = laziness, pace
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._queues: dict[StreamRole, deque[_QueuedTask]] = {q: deque() for q in StreamRole}
        self._asked = dict.fromkeys(StreamRole, 0)
        self._thread: threading.Thread | None = None
        self.questions = self.copied = 0

    # enqueueing

    def later(
        self,
        role: StreamRole,
        work: Callable[[], None],
        ready: Callable[[], bool] = _always,
        *,
        quick: bool = False,
    ) -> None:
        """Enqueue a task on a stream.

        Args:
            role: Role of the stream.
            work: Does the task.
            ready: Tells whether the task can be done yet.
            quick: Whether it is done as soon as it heads the queue, without a query.
        """
        with self._lock:
            self._queues[role].append(_QueuedTask(work, ready, quick))
            self._skip(role)
            if self._pace is not None and self._thread is None and self._queues[role]:
                self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
                self._thread.start()

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

    # progress

    def advance(self, role: StreamRole) -> None:
        """Count a query of an event, and make the stream's next copy if it is due."""
        with self._lock:
            self.questions += 1
            self._asked[role] += 1
            if self._asked[role] > self._laziness:
                self._asked[role] = 0
                self._step(role)

    def reach(self, role: StreamRole, enough: Callable[[], bool]) -> None:
        """Do the tasks of a stream until a condition holds, waiting for other processes.

        Raises:
            RuntimeError: Another process's event is not reached for long.
        """
        deadline = time.monotonic() + _EVENT_TIMEOUT
        while True:
            with self._lock:
                while not enough() and self._step(role):
                    deadline = time.monotonic() + _EVENT_TIMEOUT
                if enough():
                    return
            self.go_on()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{role} has waited {_EVENT_TIMEOUT:g} s for an event of another process"
                )
            time.sleep(_POLL_INTERVAL)

    def go_on(self) -> bool:
        """Do the next task of each stream, as a device would; return whether there was one."""
        with self._lock:
            return any([self._step(role) for role in StreamRole])

    def _step(self, role: StreamRole) -> bool:
        """Do the next task of a stream and the quick ones after it; return whether any was done."""
        waiting = self._queues[role]
        if not waiting or not waiting[0].ready():
            return False
        waiting.popleft().work()
        self._skip(role)
        return True

    def _skip(self, role: StreamRole) -> None:
        """Do the quick tasks at the head of a queue."""
        waiting = self._queues[role]
        while waiting and waiting[0].quick and waiting[0].ready():
            waiting.popleft().work()

    def _run(self) -> None:
        """Do the tasks of all streams, one each in turn, until none is left or none can go on."""
        deadline = time.monotonic() + _EVENT_TIMEOUT
        while True:
            time.sleep(self._pace or 0.0)
            with self._lock:
                if self.go_on():
                    deadline = time.monotonic() + _EVENT_TIMEOUT
                if not any(self._queues.values()) or time.monotonic() > deadline:
                    self._thread = None
                    return

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

    def alias_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor over the bytes at the storage's address."""
        storage = tensor.untyped_storage()
        raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        with normal_mode():
            return torch.frombuffer(raw, dtype=torch.uint8)

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
        self.questions += 1

    def _shared(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena
