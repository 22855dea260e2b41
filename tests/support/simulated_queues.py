"""Task queues of simulated device streams, one per stream, whose tasks run late on purpose."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from asyncddp.device.stream_interfaces import StreamRole

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


class SimulatedTaskQueues:
    """Queues of tasks, one for each stream of a simulated device.

    Args:
        laziness: Queries of events after which the next task in a queue is done.
        pace: Seconds after which the next task is done without queries, by a thread that ends when
            there is nothing left to do; never if not given.

    Attributes:
        questions: Number of queries of events.
    """

    def __init__(self, laziness: int = 0, pace: float | None = None) -> None:
        self._laziness, self._pace = laziness, pace
        self._lock = threading.RLock()
        self._queues: dict[StreamRole, deque[_QueuedTask]] = {q: deque() for q in StreamRole}
        self._asked = dict.fromkeys(StreamRole, 0)
        self._thread: threading.Thread | None = None
        self.questions = 0

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
