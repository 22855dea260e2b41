"""Progress thread: keeps operations going in the background while callers compute."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from asyncddp.transport.base import Transport

if TYPE_CHECKING:
    from asyncddp.engine.progress_engine import ProgressEngine

_SUBMIT_WINDOW = 0.0001  # seconds in which a caller may submit more before the first one starts
_SCAN_EVERY = 256  # rounds without progress after which the peers' rings are scanned


class ProgressThread:
    """Background thread that drives a progress engine while no caller does.

    While nothing is in progress it polls at intervals, so that a rank that computes, or sleeps,
    still answers its peers.
    """

    def __init__(self, engine: ProgressEngine, transport: Transport) -> None:
        self._engine = weakref.ref(engine)
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
            engine = self._engine()
            if engine is None:
                return
            idle = engine.has_driver or not engine.busy
            if idle:
                attempt = 0
                if self._awake.wait(engine.idle_interval) and not self._stopping:
                    time.sleep(_SUBMIT_WINDOW)
                self._awake.clear()
            if engine.has_driver or self._stopping:
                continue
            scan = idle or attempt % _SCAN_EVERY == _SCAN_EVERY - 1
            moved = engine.progress_and_scan() if scan else engine.progress()
            attempt = 0 if moved else attempt + 1
            if engine.busy:
                self._transport.backoff(attempt, background=True)

    def _mark_in_timeline(self) -> None:
        """Mark this thread as the progress thread in the timeline, if there is one."""
        engine = self._engine()
        if engine is not None and engine.tracer is not None:
            engine.tracer.mark_progress_thread()
