"""Progress loop: advances all operations of a rank, on waiting threads or a thread of its own."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from asyncddp.config import Config
from asyncddp.engine.lost_peers import LostPeers
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import DECODE_ERRORS, MatchKey
from asyncddp.engine.tracing import EngineTracing
from asyncddp.engine.watchdog import Watchdog
from asyncddp.engine.work import Work
from asyncddp.errors import AsyncDDPError, NotInitializedError, WaitTimeoutError
from asyncddp.transport.base import Transport

_SCAN_EVERY = 256  # rounds without progress after which the peers' rings are scanned
_MAX_DEFERRED_AGE = 0.02  # seconds
_IDLE_INTERVAL = 0.05
_SUBMIT_WINDOW = 0.0001  # seconds in which a caller may submit more before the first one starts


class ProgressLoop:
    """Loop that advances all operations of one rank; a thread that waits for any of them runs it.

    ``hooks`` are called in every round until they return True, ``deferred`` handles have no thread
    that drives them, and ``closed_because`` says why nothing can be submitted once ``closed``.
    ``wait_guard``, ``has_exited`` and ``mark_peer_failed`` are the watchdog's and the lost peers'.
    """

    def __init__(self, transport: Transport, config: Config, tracing: EngineTracing) -> None:
        self.transport, self.tracing = transport, tracing
        self._use_counts: dict[str, int] = defaultdict(int)
        self.matcher = MessageMatcher(transport, self._use_counts, tracing)
        self.lock = threading.RLock()  # held for one round of progress
        self.queue: deque[Work[Any]] = deque()  # submitted
        self.active: list[Work[Any]] = []  # in progress
        self.lost_peers = LostPeers(self.matcher)
        self.watchdog = Watchdog(config, self.matcher, self.lost_peers, self._submitted)
        self.has_exited = self.lost_peers.has_exited
        self.mark_peer_failed = self.lost_peers.mark_failed
        self.wait_guard = self.watchdog.wait_guard
        self.hooks: deque[Callable[[], bool]] = deque()
        self.deferred: dict[int, Any] = {}
        self.idle_interval = _IDLE_INTERVAL  # seconds between polls while nothing is in progress
        self._next_scan, self._timeout = 0.0, config.timeout
        self.closed = False
        self.closed_because = "called after shutdown(); call init() first"
        threaded = transport.size > 1 and transport.allows_threads
        self.thread = ProgressThread(self, transport) if threaded else None

    def ensure_open(self, what: str) -> None:
        """Raise NotInitializedError for a call, after shutdown and in a forked process."""
        if self.closed:
            raise NotInitializedError(f"{what}: {self.closed_because}")

    @property
    def busy(self) -> bool:
        """True while operations, hooks or active messages are in progress."""
        return bool(self.queue or self.active or self.hooks) or self.matcher.active_messages.busy

    # one round

    def progress(self) -> bool:
        """Make one round of progress, and tell whether anything moved.

        It receives messages, advances operations, runs hooks, and sends what these have queued.
        """
        with self.lock:
            if self.closed:
                return False
            moved = False
            for peer, bundle in self.transport.poll():
                moved = True
                self._receive(peer, bundle)
            for watch in self.transport.device_watches or ():
                watch(self._timeout)
            while self.queue:
                self.active.append(self.queue[0])  # first, so that it is always in one of them
                self.queue.popleft()
                moved = True
            moved = self._advance() or moved
            moved = (bool(self.hooks) and self._run_hooks()) or moved
            moved = self.matcher.active_messages.progress() or moved
            return self.matcher.sends.flush() or moved

    def progress_and_scan(self) -> bool:
        """Make one round of progress, and scan the peers' rings for unexpected tensors."""
        with self.lock:
            now = time.monotonic()
            if not self.closed and now >= self._next_scan:
                self.matcher.scan_rings()
                self._next_scan = now + 50 * (time.monotonic() - now)  # 2 % of the time at most
            if not self.closed:
                self.submit_deferred(_MAX_DEFERRED_AGE)
            return self.progress()

    def progress_unthreaded(self) -> None:
        """Make one round of progress where there is no progress thread."""
        if self.thread is None:
            self.progress()

    def submit_deferred(self, age: float) -> None:
        """Submit deferred handles that are older than so many seconds."""
        oldest = time.monotonic() - age
        for handle in list(self.deferred.values()):
            if handle.since <= oldest:
                handle.hand_to_engine()

    def _receive(self, peer: int, bundle: bytes) -> None:
        """Handle a peer's messages; unreadable ones fail all operations that need this peer."""
        try:
            for message in self.matcher.receive(peer, bundle):
                ended = self.watchdog.handle_message(peer, message)
                if ended is not None:
                    self.active.remove(ended)
        except AsyncDDPError:
            raise
        except DECODE_ERRORS as error:
            waiting = [work.missing() for work in self.active]
            expected = any(peer == other for missing in waiting for other, _ in missing)
            self.lost_peers.mark_unreadable(peer, error, tell_next_verb=not expected)

    def _advance(self) -> bool:
        """Advance the operations that may go on; of the ordered ones only the first."""
        ended = blocked = False
        for work in list(self.active):
            if blocked and work.spec.ordered:
                continue
            if not work.advance():
                blocked = blocked or work.spec.ordered
                self.watchdog.check(work)
            if work.finished.is_set():
                self.active.remove(work)
                ended = True
        return ended

    def _run_hooks(self) -> bool:
        """Call all progress hooks, remove those that are finished, and tell whether any were."""
        finished = [hook for hook in list(self.hooks) if hook()]
        for hook in finished:
            self.hooks.remove(hook)
        return bool(finished)

    def _submitted(self, key: MatchKey) -> bool:
        waiting = (*list(self.queue), *self.active)
        return self.matcher.has_submitted(key) or any(work.key == key for work in waiting)

    # waiting

    def drive(self, work: Work[Any], timeout: float | None = None) -> None:
        """Make progress on this thread until an operation has ended, or ``timeout`` has passed."""
        if work.finished.is_set():
            return
        limit = None if timeout is None else time.monotonic() + timeout
        attempt, span = 0, self.tracing.wait(work.spec)
        try:
            with self.watchdog.blocked(work, forever=limit is None):
                while not work.finished.is_set():
                    if limit is not None and time.monotonic() > limit:
                        raise WaitTimeoutError(
                            f"{self.watchdog.describe_work(work)} was not done in {timeout:g} s; "
                            f"{self.watchdog.describe_missing(work)}"
                        )
                    attempt = 0 if self.progress() else attempt + 1
                    if span is not None and attempt:
                        span.note_missing([peer for peer, _ in work.missing()])
                    if attempt % _SCAN_EVERY == _SCAN_EVERY - 1:
                        self.progress_and_scan()
                    if not work.finished.is_set():
                        self.transport.backoff(attempt)
        finally:
            if span is not None:
                span.end()

    def wait_until(
        self, done: Callable[[], bool], what: str, peers: Callable[[], list[int]]
    ) -> None:
        """Wait until a condition holds, making progress meanwhile; for one-sided operations.

        ``what`` names the condition in messages, and ``peers`` returns the ranks that hold it up.
        It raises after shutdown, when one of these ranks has left, and after the deadline.
        """
        attempt, check = 0, self.watchdog.wait_guard(what)
        while not done():
            self.ensure_open(what)
            check(peers())
            attempt = 0 if self.progress() else attempt + 1
            self.transport.backoff(attempt)


class ProgressThread:
    """Background thread that drives a progress loop while no caller does.

    While nothing is in progress it polls at intervals, so that a rank that computes still answers.
    """

    def __init__(self, loop: ProgressLoop, transport: Transport) -> None:
        self._loop = weakref.ref(loop)
        self._transport, self._tracing = transport, loop.tracing
        self._awake = threading.Event()
        self._stopping = False
        name = f"asyncddp-progress-{transport.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, since an operation or hook was added."""
        self._awake.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        self._tracing.mark_progress_thread()
        attempt = 0
        while not self._stopping:
            loop = self._loop()
            if loop is None:
                return
            idle = loop.watchdog.has_driver or not loop.busy
            if idle:
                attempt = 0
                if self._awake.wait(loop.idle_interval) and not self._stopping:
                    time.sleep(_SUBMIT_WINDOW)
                self._awake.clear()
            if loop.watchdog.has_driver or self._stopping:
                continue
            scan = idle or attempt % _SCAN_EVERY == _SCAN_EVERY - 1
            moved = loop.progress_and_scan() if scan else loop.progress()
            attempt = 0 if moved else attempt + 1
            if loop.busy:
                self._transport.backoff(attempt, background=True)
