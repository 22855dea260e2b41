"""The thread that keeps verbs going while the caller computes."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from asyncddp.transport.contract import Transport

if TYPE_CHECKING:
    from asyncddp.engine.engine import Engine

__all__ = ["Worker"]

_GATHER = 0.0001  # seconds in which a caller may go on submitting before the first is started
_LOOK = 256  # rounds without progress after which to look around


class Worker:
    """Drives an engine while something is under way and no caller does; listens otherwise.

    Listening lets a rank that computes, or sleeps, answer a peer that asks or contradicts.
    """

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = weakref.ref(engine)
        self._transport = transport
        self._awake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"asyncddp-worker-{transport.rank}", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._awake.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        self._introduce()
        attempt = 0
        while not self._stopping:
            engine = self._engine()
            if engine is None:
                return
            idle = engine.driven or not engine.busy
            if idle:
                attempt = 0
                if self._awake.wait(engine.pause) and not self._stopping:
                    time.sleep(_GATHER)
                self._awake.clear()
            if engine.driven or self._stopping:
                continue
            looks = idle or attempt % _LOOK == _LOOK - 1
            moved = engine.listen() if looks else engine.progress()
            attempt = 0 if moved else attempt + 1
            if engine.busy:
                self._transport.rest(attempt, background=True)

    def _introduce(self) -> None:
        """Say, where there is a timeline, that this thread mixes what others do not."""
        engine = self._engine()
        if engine is not None and engine.recorder is not None:
            engine.recorder.works_here()
