"""Progress driver: drives the progress loop from threads that wait, or from a progress thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncddp.config import Config
from asyncddp.engine.active_messages import ActiveMessages
from asyncddp.engine.call_tracing import WaitTracer
from asyncddp.engine.progress_loop import SCAN_EVERY, ProgressLoop
from asyncddp.engine.progress_thread import ProgressThread
from asyncddp.engine.work import Work
from asyncddp.errors import NotInitializedError, WaitTimeoutError
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport


class ProgressDriver(ProgressLoop):
    """Progress driver: any thread that waits for one operation advances all pending operations.

    A progress thread drives the operations in progress while no caller does.

    Args:
        transport: The transport that carries messages and tensors.
        config: Deadlines and the check mode.
        tracer: The timeline's tracer, if there is one.
    """

    def __init__(self, transport: Transport, config: Config, tracer: Tracer | None = None) -> None:
        super().__init__(transport, config, tracer)
        self._progress_thread = (
            ProgressThread(self, transport)
            if transport.size > 1 and transport.allows_threads
            else None
        )

    # operations

    def drive(self, work: Work[Any], timeout: float | None = None) -> None:
        """Make progress on the calling thread until an operation has ended.

        Raises:
            WaitTimeoutError: ``timeout`` seconds have passed.
        """
        if work.finished.is_set():
            return
        if self.tracer is None:
            self._drive(work, timeout, self.progress)
            return
        wait_tracer = WaitTracer(self.tracer, work, self.progress)
        try:
            self._drive(work, timeout, wait_tracer.progress)
        finally:
            wait_tracer.end()

    def _drive(self, work: Work[Any], timeout: float | None, progress: Callable[[], bool]) -> None:
        limit = None if timeout is None else time.monotonic() + timeout
        attempt = 0
        with self._watchdog.blocked(work, forever=limit is None):
            while not work.finished.is_set():
                if limit is not None and time.monotonic() > limit:
                    raise WaitTimeoutError(
                        f"{self._watchdog.describe_work(work)} was not done in {timeout:g} s; "
                        f"{self._watchdog.describe_missing(work)}"
                    )
                attempt = 0 if progress() else attempt + 1
                if attempt % SCAN_EVERY == SCAN_EVERY - 1:
                    self.progress_and_scan()
                if not work.finished.is_set():
                    self.transport.backoff(attempt)

    def progress_unthreaded(self) -> None:
        """Make one round of progress where there is no progress thread."""
        if self._progress_thread is None:
            self.progress()

    # one-sided operations

    @contextmanager
    def active_messages(self) -> Iterator[ActiveMessages]:
        """Give access to the active messages under the engine's lock, and flush them at the end.

        Raises:
            NotInitializedError: After shutdown.
        """
        with self._lock:
            if self.closed:
                raise NotInitializedError(self._closed_because)
            yield self.matcher.active_messages
            self.matcher.flush()

    def add_progress_hook(self, hook: Callable[[], bool]) -> None:
        """Add a function that is called in every round of progress until it returns True.

        Args:
            hook: It neither raises nor waits, also not for a lock whose owner may wait for the
                engine.
        """
        self._progress_hooks.append(hook)
        if self._progress_thread is not None:
            self._progress_thread.wake()

    def wait_guard(self, what: str) -> Callable[[list[int]], None]:
        """Return a check that bounds a wait for peers, by :meth:`Watchdog.wait_guard`."""
        return self._watchdog.wait_guard(what)

    def wait_until(
        self, done: Callable[[], bool], what: str, peers: Callable[[], list[int]]
    ) -> None:
        """Wait until a condition holds, making progress meanwhile; for one-sided operations.

        Args:
            done: Tells whether the condition holds.
            what: The name of the condition, for messages.
            peers: Returns the ranks that have yet to do their part.

        Raises:
            NotInitializedError: After shutdown.
            PeerLeftError: One of these ranks has left.
            WaitTimeoutError: The deadline has passed.
        """
        attempt, check = 0, self.wait_guard(what)
        while not done():
            self.ensure_open(what)
            check(peers())
            attempt = 0 if self.progress() else attempt + 1
            self.transport.backoff(attempt)
