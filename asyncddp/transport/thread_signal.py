"""Signals that wake threads of one process, for ranks that are threads.

Threads that are to be woken stand in a queue, and each that goes on wakes the next one, since the
interpreter runs one at a time: many at once would all ask for it every few milliseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress


class _QueuedThread:
    """Waiting thread, woken through its lock when its turn comes in the queue."""

    def __init__(self, condition: Callable[[], bool] | None) -> None:
        self.condition = condition  # that those check who would wake it
        self.lock = threading.Lock()
        self.lock.acquire()
        self.queued = self.left = False


class ThreadWakeQueue:
    """Queue of waiting threads; wakes the next only after the last one woken has started to run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: deque[_QueuedThread] = deque()
        self._woken: _QueuedThread | None = None

    def add(self, waiters: Iterable[_QueuedThread]) -> None:
        """Append waiters to the queue, and wake the first if no wake-up is pending."""
        with self._lock:
            for waiter in waiters:
                if not waiter.queued and not waiter.left:
                    waiter.queued = True
                    self._queued.append(waiter)
            if self._woken is None:
                self._wake_next()

    def pass_on(self, waiter: _QueuedThread) -> None:
        """Remove a waiter that runs or gave up, and wake the next if it had the turn."""
        with self._lock:
            waiter.left = True
            if self._woken is waiter:
                self._wake_next()
            elif waiter.queued:
                self._queued.remove(waiter)

    def _wake_next(self) -> None:
        self._woken = self._queued.popleft() if self._queued else None
        if self._woken is not None:
            self._woken.lock.release()


class ThreadSignal:
    """Signal of new data for a rank, which its threads wait for.

    Example:
        >>> signal = ThreadSignal(ThreadWakeQueue())
        >>> signal.wait(0.001), signal.set(), signal.wait(60.0)
        (False, None, True)
    """

    def __init__(self, queue: ThreadWakeQueue) -> None:
        self._queue, self._is_set = queue, False
        self._waiters: deque[_QueuedThread] = deque()

    def set(self) -> None:
        """Set the signal and wake the waiting threads; later waits return at once."""
        if woken := self.notify():
            self._queue.add(woken)

    def notify(self) -> list[_QueuedThread]:
        """Set the signal, and return the threads to wake."""
        self._is_set = True
        if not self._waiters:
            return []
        every = list(self._waiters)
        return [one for one in every if one.condition is None or one.condition()]

    def clear(self) -> None:
        """Reset the signal; afterwards, threads must check for data before they wait."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Block until the signal is set or the timeout passes; tell whether it was set."""
        return self._is_set or self._wait(lambda: self._is_set, None, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Block until a condition holds; threads that set the signal evaluate it too.

        It neither raises nor changes anything.
        """
        return condition() or self._wait(condition, condition, timeout)

    def _wait(
        self, has_come: Callable[[], bool], condition: Callable[[], bool] | None, timeout: float
    ) -> bool:
        waiter = _QueuedThread(condition)
        self._waiters.append(waiter)
        try:
            return has_come() or waiter.lock.acquire(timeout=timeout)
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)
            self._queue.pass_on(waiter)


def set_signals(signals: Iterable[ThreadSignal], queue: ThreadWakeQueue) -> None:
    """Set several signals, and wake their threads through one queue."""
    queue.add([waiter for signal in signals for waiter in signal.notify()])
