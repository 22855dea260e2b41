"""A stand-in for the streams of a device: copies between tensors of the host, done late.

What is copied stays queued until somebody has asked for it often enough, as on a device that is
busy. Whoever reads what was not yet copied, or writes what has yet to be read, gets wrong values
here as it would there, so that tests find what forgets to wait.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from asyncddp.memory.shared import Arena
from asyncddp.memory.streams import DeviceStreams, Event, Queue

__all__ = ["HostStreams"]


class _HostEvent:
    """A place in a queue of the stand-in."""

    def __init__(self, owner: HostStreams, queue: Queue) -> None:
        self._owner, self.queue = owner, queue
        self.reached = False

    def done(self) -> bool:
        """Whether it was reached; every question brings its queue a little further."""
        if not self.reached:
            self._owner.advance(self.queue)
        return self.reached


class HostStreams(DeviceStreams):
    """Queues of copies on the host.

    Args:
        laziness: Questions after which the next copy in a queue is made.

    Example:
        >>> streams, out = HostStreams(laziness=1), torch.zeros(1)
        >>> streams.copy(out, torch.ones(1), Queue.OUT)
        >>> copied = streams.mark(Queue.OUT)
        >>> float(out), copied.done(), copied.done(), float(out)
        (0.0, False, True, 1.0)
    """

    kind = "stand-in"
    device = torch.device("cpu")

    def __init__(self, laziness: int = 0) -> None:
        self._laziness = laziness
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._queues: dict[Queue, deque[Callable[[], None]]] = {q: deque() for q in Queue}
        self._asked = dict.fromkeys(Queue, 0)

    def mark(self, queue: Queue) -> Event:
        """Queue an event; reached at once where nothing is before it."""
        event = _HostEvent(self, queue)

        def reach() -> None:
            """Let the event be reached."""
            event.reached = True

        with self._lock:
            self._queues[queue].append(reach)
            self._skip(queue)
        return event

    def after(self, queue: Queue, event: Event) -> None:
        """Do now what the event is behind, since nothing later may come before it."""
        del queue
        if isinstance(event, _HostEvent):
            with self._lock:
                while not event.reached:
                    self._queues[event.queue].popleft()()

    def working(self, queue: Queue) -> AbstractContextManager[None]:
        """What torch does on the host is done at once."""
        del queue
        return nullcontext()

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
        """Queue a copy."""

        def copied() -> None:
            """Copy."""
            out.copy_(source)

        with self._lock:
            self._queues[queue].append(copied)

    def hold(self, tensor: torch.Tensor, queue: Queue) -> None:
        """What is queued holds its tensors."""

    def pointer(self, queue: Queue) -> int:
        """Its number."""
        return list(Queue).index(queue)

    def pinned(self, size: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def lendable(self, size: int) -> torch.Tensor:
        """Memory that the processes of this machine see alike."""
        return self._shared().empty((size,), torch.uint8)

    def lend(self, tensor: torch.Tensor) -> bytes:
        """This process and where the tensor is in its memory."""
        return pickle.dumps((os.getpid(), tensor.nbytes, self._shared().locate(tensor)))

    def borrow(self, token: bytes) -> torch.Tensor:
        """Map it."""
        process, size, place = pickle.loads(token)
        return self._shared().open(process, place).tensor(place.offset, (size,), torch.uint8)

    def _shared(self) -> Arena:
        if self._arena is None:
            self._arena = Arena()
        return self._arena

    def advance(self, queue: Queue) -> None:
        """Somebody has asked: make the next copy of a queue, if it was asked often enough."""
        with self._lock:
            self._asked[queue] += 1
            if self._asked[queue] > self._laziness:
                self._asked[queue] = 0
                if self._queues[queue]:
                    self._queues[queue].popleft()()
                self._skip(queue)

    def _skip(self, queue: Queue) -> None:
        """Reach the events that are next."""
        waiting = self._queues[queue]
        while waiting and waiting[0].__name__ == "reach":
            waiting.popleft()()
