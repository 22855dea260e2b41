"""Progress thread: keeps operations going in the background while callers compute."""

from __future__ import annotations

import threading
import time
import weakref

from asyncddp.engine.progress_loop import SCAN_EVERY, ProgressLoop
from asyncddp.transport.base import Transport

_SUBMIT_WINDOW = 0.0001  # seconds in which a caller may submit more before the first one starts


class ProgressThread:
    """Background thread that drives a progress loop while no caller does.

    While nothing is in progress it polls at intervals, so that a rank that computes, or sleeps,
    still answers its peers.
    """

    def __init__(self, loop: ProgressLoop, transport: Transport) -> None:
        self._loop = weakref.ref(loop)
        self._transport = transport
        self._awake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"asyncddp-progress-{transport.rank}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread: there is something to do."""
        self._awake.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        self._mark_in_timeline()
        attempt = 0
        while not self._stopping:
            loop = self._loop()
            if loop is None:
                return
            idle = loop.has_driver or not loop.busy
            if idle:
                attempt = 0
                if self._awake.wait(loop.idle_interval) and not self._stopping:
                    time.sleep(_SUBMIT_WINDOW)
                self._awake.clear()
            if loop.has_driver or self._stopping:
                continue
            scan = idle or attempt % SCAN_EVERY == SCAN_EVERY - 1
            moved = loop.progress_and_scan() if scan else loop.progress()
            attempt = 0 if moved else attempt + 1
            if loop.busy:
                self._transport.backoff(attempt, background=True)

    def _mark_in_timeline(self) -> None:
        """Mark this thread as the progress thread in the timeline, if there is one."""
        loop = self._loop()
        if loop is not None and loop.tracer is not None:
            loop.tracer.mark_progress_thread()
