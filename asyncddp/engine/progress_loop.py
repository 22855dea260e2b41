"""Progress loop: polls the transport and advances all operations of one rank, round by round."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from asyncddp.config import Config
from asyncddp.engine.lost_peers import LostPeers
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import DECODE_ERRORS, MatchKey
from asyncddp.engine.watchdog import Watchdog
from asyncddp.engine.work import Work
from asyncddp.errors import AsyncDDPError, NotInitializedError
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport

SCAN_EVERY = 256
"""Rounds without progress after which the peers' rings are scanned."""
_MAX_DEFERRED_AGE = 0.02  # seconds
_IDLE_INTERVAL = 0.05  # seconds


class ProgressLoop:
    """Loop that advances all operations of one rank; any thread may run it, one at a time.

    Args:
        transport: The transport that carries messages and tensors.
        config: Deadlines and the check mode.
        tracer: The timeline's tracer, if there is one.
    """

    def __init__(self, transport: Transport, config: Config, tracer: Tracer | None = None) -> None:
        self.transport, self.config, self.tracer = transport, config, tracer
        self._use_counts: dict[str, int] = defaultdict(int)
        self.matcher = MessageMatcher(transport, self._use_counts, tracer)
        self._lock = threading.RLock()  # held for one round of progress
        self._queue: deque[Work[Any]] = deque()
        self._active: list[Work[Any]] = []
        self._lost_peers = LostPeers(self.matcher)
        self._watchdog = Watchdog(config, self.matcher, self._lost_peers, self._submitted)
        self.deferred: dict[int, Any] = {}
        """Handles that no thread drives yet; those not waited for soon are submitted here."""
        self._progress_hooks: deque[Callable[[], bool]] = deque()
        self.idle_interval = _IDLE_INTERVAL
        """Seconds between two polls of the transport while nothing is in progress."""
        self._next_scan = 0.0
        self.closed = False
        self._closed_because = "called after shutdown(); call init() first"

    def ensure_open(self, what: str) -> None:
        """Raise after shutdown, and in a forked process.

        Args:
            what: The name of the call, for the message.

        Raises:
            NotInitializedError: After shutdown, or in a forked process.
        """
        if self.closed:
            raise NotInitializedError(f"{what}: {self._closed_because}")

    @property
    def has_driver(self) -> bool:
        """True while a caller drives the engine, so that the progress thread need not."""
        return self._watchdog.has_driver

    @property
    def busy(self) -> bool:
        """True while operations, hooks or active messages are in progress."""
        waiting = self._queue or self._active or self._progress_hooks
        return bool(waiting) or self.matcher.active_messages.busy

    def progress_and_scan(self) -> bool:
        """Make one round of progress, and scan the peers' rings for unexpected tensors."""
        with self._lock:
            now = time.monotonic()
            if not self.closed and now >= self._next_scan:
                self.matcher.scan_rings()
                self._next_scan = now + 50 * (time.monotonic() - now)  # 2 % of the time at most
            if not self.closed:
                self._submit_deferred(_MAX_DEFERRED_AGE)
            return self.progress()

    def _submit_deferred(self, age: float) -> None:
        """Submit deferred handles that are older than so many seconds."""
        oldest = time.monotonic() - age
        for handle in list(self.deferred.values()):
            if handle.since <= oldest:
                handle.hand_to_engine()

    def progress(self) -> bool:
        """Make one round of progress, and tell whether anything moved.

        It receives messages, advances operations, runs hooks, and sends what these have queued.
        """
        with self._lock:
            if self.closed:
                return False
            moved = False
            for peer, bundle in self.transport.poll():
                moved = True
                self._receive(peer, bundle)
            while self._queue:
                self._active.append(self._queue[0])  # first, so that it is always in one of them
                self._queue.popleft()
                moved = True
            moved = self._advance() or moved
            moved = (bool(self._progress_hooks) and self._run_progress_hooks()) or moved
            moved = self.matcher.active_messages.progress() or moved
            return self.matcher.flush() or moved

    def _receive(self, peer: int, bundle: bytes) -> None:
        """Handle a peer's messages; unreadable ones fail all operations that need this peer."""
        try:
            for message in self.matcher.receive(peer, bundle):
                ended = self._watchdog.handle_message(peer, message)
                if ended is not None:
                    self._active.remove(ended)
        except AsyncDDPError:
            raise
        except DECODE_ERRORS as error:
            waiting = [work.missing() for work in self._active]
            expected = any(peer == other for missing in waiting for other, _ in missing)
            self._lost_peers.mark_unreadable(peer, error, tell_next_verb=not expected)

    def _advance(self) -> bool:
        """Advance the operations that may go on; of the ordered ones only the first."""
        ended, ordered = False, False
        for work in list(self._active):
            if work.spec.ordered:
                if ordered:
                    continue
                ordered = not work.advance()
            else:
                work.advance()
            if not work.finished.is_set():
                self._watchdog.check(work)
            if work.finished.is_set():
                self._active.remove(work)
                ended = True
        return ended

    def _run_progress_hooks(self) -> bool:
        """Call all progress hooks, remove those that are finished, and tell whether any were."""
        finished = [hook for hook in list(self._progress_hooks) if hook()]
        for hook in finished:
            self._progress_hooks.remove(hook)
        return bool(finished)

    def _submitted(self, key: MatchKey) -> bool:
        return self.matcher.has_submitted(key) or any(
            work.key == key for work in (*list(self._queue), *self._active)
        )
