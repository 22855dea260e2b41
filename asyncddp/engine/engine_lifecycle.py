"""Life cycle of a progress engine: handles exits and failures of ranks, shutdown, and forks."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from asyncddp.config import Config
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, PeerExit
from asyncddp.engine.progress_driver import ProgressDriver
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport

_FORKED = "this process was forked from"
_LIVE_ENGINES: weakref.WeakSet[EngineLifecycle] = weakref.WeakSet()


def _after_fork() -> None:
    """Detach the engines that a child process inherited from its parent."""
    for engine in list(_LIVE_ENGINES):
        engine.detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class EngineLifecycle(ProgressDriver):
    """Life cycle of one rank's engine: announces exits, fails operations, handles forks, closes.

    Args:
        transport: The transport that carries messages and tensors.
        config: Deadlines and the check mode.
        tracer: The timeline's tracer, if there is one.
    """

    def __init__(self, transport: Transport, config: Config, tracer: Tracer | None = None) -> None:
        super().__init__(transport, config, tracer)
        self._submit_lock = threading.Lock()  # so that submitting never waits for a round
        self._failure: str | None = None
        _LIVE_ENGINES.add(self)

    # peers

    def announce_exit(self, reason: str) -> None:
        """Tell all peers that this rank submits nothing more, so that none of them waits for it."""
        with self._lock:
            self.progress()
            collective_counts = {
                name: self._use_counts[name] for name in (COLLECTIVE, MACHINE_COLLECTIVE)
            }
            for peer in range(self.transport.size):
                if peer != self.transport.rank:
                    self.matcher.put(peer, PeerExit(reason, collective_counts))
            self.matcher.flush()

    def readmit_peers(self) -> None:
        """Take back :meth:`announce_exit` of all ranks, while none of them submits anything."""
        with self._lock:
            self.progress()
            self._lost_peers.readmit()

    def has_exited(self, peer: int) -> bool:
        """Tell whether a peer has announced its exit, without having failed."""
        return self._lost_peers.has_exited(peer)

    def mark_peer_failed(self, peer: int, reason: str) -> None:
        """Fail operations that need a failed peer, once messages sent before are handled."""
        self._lost_peers.mark_failed(peer, reason)

    # this rank

    def fail_all(self, reason: str) -> None:
        """Fail all operations in progress and every later call, for a reason."""
        with self._lock:
            self._failure = reason
            error = PeerError(f"rank {self.transport.rank}: {reason}")
            for work in (*self._active, *list(self._queue)):
                work.fail(error)
            self._active.clear()
            self._queue.clear()

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the one that made the engine."""
        return self._closed_because.startswith(_FORKED)

    def detach_after_fork(self) -> None:
        """Leave the rank to the parent process, in a child that was forked from it.

        Nothing is sent. Operations in progress end with an error, as does every later call; locks
        that another thread may have held at the fork are made anew.
        """
        rank, self._progress_thread, self.closed = self.transport.rank, None, True
        self._lock, self._submit_lock = threading.RLock(), threading.Lock()
        self._closed_because = (
            f"{_FORKED} rank {rank} (process {os.getppid()}), which alone may communicate. Call "
            "verbs in the process that called init(), or start this one with "
            'multiprocessing.get_context("spawn")'
        )
        for work in (*self._active, *self._queue):
            work.end_after_fork(NotInitializedError(f"{work.describe()}: {self._closed_because}"))
        self._active, self._queue = [], deque()
        for handle in list(self.deferred.values()):
            handle.end_after_fork(NotInitializedError(f"{handle!r}: {self._closed_because}"))
        self.deferred.clear()
        self._progress_hooks.clear()

    def close(self, reason: str) -> None:
        """Stop the progress thread, fail operations in progress, and announce this rank's exit.

        Raises:
            PeerError: A peer has refused an earlier exchange that had ended here.
        """
        if self._progress_thread is not None:
            self._progress_thread.stop()
        with self._lock:
            if self.closed:
                return
            self._submit_deferred(0.0)
            self.progress()
            for work in (*self._active, *list(self._queue)):
                work.fail(NotInitializedError(f"{work.describe()}: shut down before its end"))
            self.announce_exit(reason)
            self.matcher.active_messages.close()
            self._progress_hooks.clear()
            self.closed = True
        if self.matcher.late_error is not None:
            raise self.matcher.late_error
