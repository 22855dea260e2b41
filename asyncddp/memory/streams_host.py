"""A stand-in for the streams of a device: copies between tensors of the host, done late.

What is copied stays queued until somebody has asked for it often enough, as on a device that is
busy. Whoever reads what was not yet copied, or writes what has yet to be read, gets wrong values
here as it would there, so that tests find what forgets to wait. Queues wait for events of other
processes as those of a device do; what torch does at once waits in their stead.
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

from asyncddp.memory.allocate import empty
from asyncddp.memory.modes import normal_mode
from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.shared import Arena, Place
from asyncddp.memory.streams import DeviceStreams, Event, InterprocessEvent, Queue
from asyncddp.memory.streams_host_events import (
    HostEvent,
    ImportedHostEvent,
    InterprocessHostEvent,
)

__all__ = ["HostStreams"]

_PATIENCE = 30.0  # seconds for an event of another process
_NAP = 1e-4  # seconds


def _always() -> bool:
    return True


class _Queued(NamedTuple):
    """Something in a queue.

    Attributes:
        work: What is to be done.
        ready: Whether it can be.
        quick: Whether it takes no time: an event, or to have waited for one.
    """

    work: Callable[[], None]
    ready: Callable[[], bool] = _always
    quick: bool = False


class HostStreams(DeviceStreams):
    """Queues of copies on the host.

    Args:
        laziness: Questions after which the next copy in a queue is made.
        pace: Seconds after which the next one is made where nobody asks, by a thread that ends when
            there is nothing left to do; never if not given.

    Attributes:
        questions: How often somebody has asked whether an event was reached.
        copied: Bytes that were copied.

    Example:
        >>> streams, out = HostStreams(laziness=1), torch.zeros(1)
        >>> streams.copy(out, torch.ones(1), Queue.OUT)
        >>> copied = streams.mark(Queue.OUT)
        >>> float(out), copied.done(), copied.done(), float(out)
        (0.0, False, True, 1.0)
    """

    kind = "stand-in"
    device = torch.device("cpu")

    def __init__(self, laziness: int = 0, pace: float | None = None) -> None:
        self._laziness, self._pace = laziness, pace
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._queues: dict[Queue, deque[_Queued]] = {q: deque() for q in Queue}
        self._asked = dict.fromkeys(Queue, 0)
        self._thread: threading.Thread | None = None
        self.questions = self.copied = 0

    # what is queued

    def later(
        self,
        queue: Queue,
        work: Callable[[], None],
        ready: Callable[[], bool] = _always,
        *,
        quick: bool = False,
    ) -> None:
        """Queue anything.

        Args:
            queue: Where.
            work: What is done in its turn.
            ready: Its turn comes only once this is so.
            quick: Whether it is done as soon as it is its turn, with no question asked.
        """
        with self._lock:
            self._queues[queue].append(_Queued(work, ready, quick))
            self._skip(queue)
            if self._pace is not None and self._thread is None and self._queues[queue]:
                self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
                self._thread.start()

    def mark(self, queue: Queue) -> Event:
        """Queue an event; reached at once where nothing is before it."""
        event = HostEvent(self, queue)
        self.later(queue, event.reach, quick=True)
        return event

    def after(self, queue: Queue, event: Event) -> None:
        """Do now what the event is behind, since nothing later may come before it.

        For an event of another process the queue waits.
        """
        if isinstance(event, HostEvent):
            event.owner.reach(event.queue, lambda: event.reached)
        elif isinstance(event, ImportedHostEvent):
            self.later(queue, lambda: None, event.place(), quick=True)

    @contextmanager
    def _at_once(self, queue: Queue) -> Iterator[None]:
        self.reach(queue, lambda: not self._queues[queue])
        yield

    def working(self, queue: Queue) -> AbstractContextManager[None]:
        """What torch does on the host is done at once, after what is queued there."""
        return self._at_once(queue)

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
        """Queue a copy."""

        def copied() -> None:
            """Copy."""
            out.copy_(source)
            self.copied += out.nbytes

        self.later(queue, copied)

    # what is done

    def advance(self, queue: Queue) -> None:
        """Somebody has asked: make the next copy of a queue, if it was asked often enough."""
        with self._lock:
            self.questions += 1
            self._asked[queue] += 1
            if self._asked[queue] > self._laziness:
                self._asked[queue] = 0
                self._step(queue)

    def reach(self, queue: Queue, enough: Callable[[], bool]) -> None:
        """Do what is in a queue until it is enough, and wait for other processes where need be.

        Raises:
            RuntimeError: Another process's event is not reached for long.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self._lock:
                while not enough() and self._step(queue):
                    deadline = time.monotonic() + _PATIENCE
                if enough():
                    return
            self.go_on()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{queue} has waited {_PATIENCE:g} s for an event of another process"
                )
            time.sleep(_NAP)

    def go_on(self) -> bool:
        """Do the next thing of each queue, as a device does by itself; whether there was one."""
        with self._lock:
            return any([self._step(queue) for queue in Queue])

    def _step(self, queue: Queue) -> bool:
        """Do the next that takes time, and what takes none after it; whether anything was done."""
        waiting = self._queues[queue]
        if not waiting or not waiting[0].ready():
            return False
        waiting.popleft().work()
        self._skip(queue)
        return True

    def _skip(self, queue: Queue) -> None:
        """Reach the events that are next."""
        waiting = self._queues[queue]
        while waiting and waiting[0].quick and waiting[0].ready():
            waiting.popleft().work()

    def _run(self) -> None:
        """Do one thing of each queue after the other, until there is nothing or nothing moves."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            time.sleep(self._pace or 0.0)
            with self._lock:
                if self.go_on():
                    deadline = time.monotonic() + _PATIENCE
                if not any(self._queues.values()) or time.monotonic() > deadline:
                    self._thread = None
                    return

    # memory

    def hold(self, tensor: torch.Tensor, queue: Queue) -> None:
        """What is queued holds its tensors."""

    def pointer(self, queue: Queue) -> int:
        """Its number."""
        return list(Queue).index(queue)

    def pinned(self, size: int) -> torch.Tensor:
        """Plain memory."""
        return empty((size,), torch.uint8)

    def lendable(self, size: int) -> torch.Tensor:
        """Memory that the processes of this machine see alike."""
        return self._shared().empty((size,), torch.uint8)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes at its address."""
        storage = tensor.untyped_storage()
        raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        with normal_mode():
            return torch.frombuffer(raw, dtype=torch.uint8)

    def lend(self, tensor: torch.Tensor) -> bytes:
        """This process and where the tensor is in its memory."""
        place = self._shared().locate(tensor)
        if place is None:
            raise RuntimeError("expected a tensor in memory that other processes see")
        return pack((os.getpid(), tensor.untyped_storage().nbytes(), place))

    def borrow(self, token: bytes) -> torch.Tensor:
        """Map it."""
        process, size, place = unpack(token, tuple[int, int, Place], "a place in memory")
        return self._shared().open(process, place).tensor(place.offset, (size,), torch.uint8)

    def interprocess_event(self) -> InterprocessEvent:
        """An event in such memory."""
        return InterprocessHostEvent(self, self._shared())

    def imported_event(self, handle: bytes) -> Event:
        """Map it."""
        return ImportedHostEvent.open(self._shared(), handle, self._note_question)

    def _note_question(self) -> None:
        self.questions += 1

    def _shared(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena
