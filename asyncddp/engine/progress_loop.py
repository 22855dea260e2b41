"""Progress loop: advances all operations of a rank, in waiting threads or in a progress thread."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncddp.config import Config
from asyncddp.device.stream_interfaces import mark_library_thread
from asyncddp.engine.deferred_calls import DeferredCalls
from asyncddp.engine.lost_peers import LostPeers
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import DECODE_ERRORS, ExitAnnouncement, Message
from asyncddp.engine.tracing import EngineTracing
from asyncddp.engine.watchdog import Watchdog
from asyncddp.engine.work import Work
from asyncddp.errors import (
    AsyncDDPError,
    IsolatedError,
    NotInitializedError,
    PeerError,
    PeerLeftError,
    WaitTimeoutError,
)
from asyncddp.transport.base import Transport

_SCAN_EVERY = 256  # rounds without progress after which the peers' rings are scanned
_MAX_DEFERRED_AGE = 0.02  # seconds
_IDLE_INTERVAL = 0.05
_MAX_OVERLAPPING = 16  # collectives of one sequence that are under way at once
_SUBMIT_WINDOW = 0.0001  # seconds in which a caller may submit more before the first one starts


class ProgressLoop:
    """Loop that advances all operations of one rank; driven by any thread that waits for one.

    ``hooks`` are called in every round until they return True. No thread drives ``deferred`` calls.
    ``pause`` is called between two polls if there are fewer cores than ranks, and else is None.
    ``closed_because`` is the reason why nothing can be submitted once ``closed``.
    """

    def __init__(self, transport: Transport, config: Config, tracing: EngineTracing) -> None:
        self.transport, self.tracing, self.tracer = transport, tracing, tracing.tracer
        self._use_counts: dict[str, int] = defaultdict(int)
        elastic = config.elastic
        self.matcher = MessageMatcher(transport, self._use_counts, tracing, elastic=elastic)
        self.lock = threading.RLock()  # held for one round of progress
        self.queue: deque[Work[Any]] = deque()  # submitted
        self.active: list[Work[Any]] = []  # in progress
        self.lost_peers = LostPeers(self.matcher, transport.exit_records)
        self.watchdog = Watchdog(config, self.matcher, self.lost_peers)
        self.has_exited = self.lost_peers.has_exited
        self.has_failed = self.lost_peers.has_failed
        self.hooks: deque[Callable[[], bool]] = deque()
        self.deferred = DeferredCalls()
        self.pause = os.sched_yield if transport.cores_shared else None
        self.idle_interval = _IDLE_INTERVAL  # seconds between polls while nothing is in progress
        self._next_scan, self._timeout = 0.0, config.timeout
        self.closed = False
        self.closed_because = "called after shutdown(); call init() first"
        self._failure: tuple[str, BaseException | None] | None = None  # of :meth:`fail_all`
        threaded = transport.size > 1 and transport.allows_threads
        self.thread = ProgressThread(self, transport) if threaded else None

    def ensure_open(self, what: str) -> None:
        """Raise a PeerError after :meth:`fail_all`, NotInitializedError after shutdown or fork."""
        if self.closed:
            raise self._closed_error(what, self.closed_because)

    def _closed_error(self, what: str, closed_because: str) -> AsyncDDPError:
        if self._failure is None:
            return NotInitializedError(f"{what}: {closed_because}")
        reason, cause = self._failure
        kind = IsolatedError if isinstance(cause, IsolatedError) else PeerError
        error = kind(f"rank {self.transport.rank}: {what}: {reason}")
        error.__cause__ = cause
        return error

    @property
    def busy(self) -> bool:
        """True while operations, hooks or active messages are in progress."""
        matcher = self.matcher
        here = self.queue or self.active or self.hooks or matcher.expected
        return bool(here) or matcher.active_messages.busy

    # one round

    def progress(self, *, scan: bool = False) -> bool:
        """Make one round of progress; return whether there was any progress.

        It receives messages, advances operations, runs hooks, and sends queued messages. With
        ``scan`` it looks for unexpected tensors in the peers' rings. Raises a PeerLeftError if MPI
        has found a failed process; any other exception fails all operations of this rank for good.
        """
        with self.lock:
            if self.closed:
                self._fail_submitted(self.closed_because)  # meanwhile, by another thread
                return False
            try:
                if scan:
                    self._scan()
                if self.deferred.unsent:
                    self.deferred.send()
                moved = False
                for peer, bundle in self.transport.poll():
                    moved = True
                    self._receive(peer, bundle)
                self._look_for_lost_peers()
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
            except PeerLeftError:  # of MPI: windows in shared memory go on
                raise
            except IsolatedError as error:
                self.fail_all(str(error), error)
                return True
            except Exception as error:  # noqa: BLE001 - the error of all operations
                what = f"{type(error).__name__}: {error}"
                self.fail_all(f"it raised {what}; end and restart the run", error)
                return True

    def _look_for_lost_peers(self) -> None:
        """Record lost peers, and leave them out of elastic runs once their last messages came."""
        if failed := self.transport.failed_peers():
            self.lost_peers.mark_dead(failed)
        if self.matcher.elastic:
            for peer in self.lost_peers.drained() if self.lost_peers.any else ():
                self.matcher.leave_out(peer)
            self._progress_membership()

    def _progress_membership(self) -> None:
        """Go on with the agreement on who takes part, in runs where that may change."""

    def _receive_membership(self, peer: int, message: Message) -> None:
        """Take a peer's message about who takes part; others are not meant."""

    def _scan(self) -> None:
        if (now := time.monotonic()) >= self._next_scan:
            self.matcher.scan_rings()
            self._next_scan = now + 50 * (time.monotonic() - now)  # 2 % of the time at most
        self.deferred.hand_to_engine(_MAX_DEFERRED_AGE)

    def progress_unthreaded(self) -> None:
        """Make one round of progress if there is no progress thread."""
        if self.thread is None:
            self.progress()

    def _receive(self, peer: int, bundle: bytes) -> None:
        """Handle a peer's messages; unreadable ones fail all operations that need this peer."""
        try:
            for message in self.matcher.receive(peer, bundle):
                ended = self.watchdog.handle_message(peer, message)
                if ended is not None:
                    self.active.remove(ended)
                if self.matcher.elastic:
                    self._receive_membership(peer, message)
        except AsyncDDPError:
            raise
        except DECODE_ERRORS as error:
            waiting = [work.missing() for work in self.active]
            expected = any(peer == other for missing in waiting for other, _ in missing)
            self.lost_peers.mark_unreadable(peer, error, tell_next_verb=not expected)

    def _advance(self) -> bool:
        """Advance all operations; the operations of a sequence start one after the other."""
        moved = False
        under_way: dict[str, int] = {}
        for work in list(self.active):
            sequence = work.sequence
            if sequence is not None and under_way.get(sequence, 0) >= _MAX_OVERLAPPING:
                continue
            if not work.advance():
                if sequence is not None:
                    more = 1 if work.next_may_start else _MAX_OVERLAPPING
                    under_way[sequence] = under_way.get(sequence, 0) + more
                moved = self.watchdog.check(work) or moved
            if work.finished:
                self.active.remove(work)
                moved = True
        return moved

    def _run_hooks(self) -> bool:
        finished = [hook for hook in list(self.hooks) if hook()]
        for hook in finished:
            self.hooks.remove(hook)
        return bool(finished)

    # end

    def fail_all(self, reason: str, cause: BaseException | None = None) -> None:
        """Fail all operations in progress and all later calls; notify peers of the reason."""
        with self.lock, suppress(Exception):  # whatever broke may break this, too
            if not self.closed:
                self._failure = reason, cause
                self._end(reason)
                self._tell_peers_of_exit(ExitAnnouncement(reason, {}))

    def _end(self, closed_because: str) -> None:
        self.closed = True
        self._fail_submitted(closed_because)
        self.hooks.clear()
        self.matcher.active_messages.close()
        self.matcher.sends.flush()

    def _fail_submitted(self, closed_because: str) -> None:
        while self.queue or self.active:
            work = self.active.pop() if self.active else self.queue.popleft()
            what = work.spec.verb
            with suppress(Exception):  # what broke may break this, too; it is to fail all the same
                what = work.describe()
            with suppress(Exception):  # the others are to fail all the same
                work.fail(self._closed_error(what, closed_because))

    def _tell_peers_of_exit(self, message: ExitAnnouncement) -> None:
        if self.transport.exit_records is not None:
            self.lost_peers.mark_exited(self.transport.rank, message)
            return
        for peer in range(self.transport.size):
            if peer != self.transport.rank:
                self.matcher.sends.put(peer, message)
        self.matcher.sends.flush()

    # waiting

    def drive(self, work: Work[Any], timeout: float | None = None) -> None:
        """Make progress in this thread until an operation has ended, or ``timeout`` has passed."""
        if work.finished:
            return
        limit = None if timeout is None else time.monotonic() + timeout
        attempt, spec, tracer = 0, work.spec, self.tracer
        span = None if tracer is None else tracer.start_wait(spec.verb, spec.label)
        try:
            with self.watchdog.blocked(work, forever=limit is None):
                while not work.finished:
                    if limit is not None and time.monotonic() > limit:
                        raise WaitTimeoutError(
                            f"{self.watchdog.describe_work(work)} was not done in {timeout:g} s; "
                            f"{self.watchdog.describe_missing(work)}"
                        )
                    attempt = 0 if self.progress() else attempt + 1
                    if span is not None and attempt:
                        span.note_missing([peer for peer, _ in work.missing()])
                    if attempt % _SCAN_EVERY == _SCAN_EVERY - 1:
                        self.progress(scan=True)
                    if not work.finished:
                        self.transport.backoff(attempt)
        finally:
            if span is not None:
                span.end()

    def wait_until(
        self, done: Callable[[], bool], what: str, peers: Callable[[], list[int]]
    ) -> None:
        """Make progress until a condition of a one-sided operation holds.

        ``what`` names the condition in messages, and ``peers`` returns the ranks to wait for.
        Raises an error after shutdown, after the deadline, if one of these ranks has left, and if
        an active message from or to this rank has failed.
        """
        attempt, check = 0, self.watchdog.wait_guard(what)
        while not done():
            self.ensure_open(what)
            self.matcher.channels.raise_late_error()
            check(peers())
            attempt = 0 if self.progress() else attempt + 1
            self.transport.backoff(attempt)


class ProgressThread:
    """Background thread that drives the progress loop while no calling thread does.

    While nothing is in progress, it polls at intervals, so that a computing rank still answers.
    """

    def __init__(self, loop: ProgressLoop, transport: Transport) -> None:
        self._loop = weakref.ref(loop)
        self._transport, self._tracer = transport, loop.tracer
        self._awake = threading.Event()
        self._stopping = False
        name = f"asyncddp-progress-{transport.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, after an operation, hook or deferred call was added."""
        self._awake.set()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stopping = True
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        mark_library_thread()
        if self._tracer is not None:
            self._tracer.mark_progress_thread()
        attempt, least_pause, last_round = 0, self._transport.least_pause, time.monotonic()
        while not self._stopping:
            loop = self._loop()
            if loop is None or loop.closed:
                return
            idle, woken = loop.watchdog.has_driver or not loop.busy, False
            if idle:
                attempt = 0
                woken = self._awake.wait(max(loop.idle_interval, least_pause))
                if woken and not self._stopping:
                    time.sleep(_SUBMIT_WINDOW)
                self._awake.clear()
            needless = woken and not (loop.busy or loop.deferred.unsent)  # the caller was faster
            needless = needless and time.monotonic() < last_round + loop.idle_interval
            if needless or loop.watchdog.has_driver or self._stopping:
                continue
            last_round = time.monotonic()
            scan = idle or attempt % _SCAN_EVERY == _SCAN_EVERY - 1
            moved = False
            with suppress(PeerLeftError):  # raised where somebody waits
                moved = loop.progress(scan=scan)
            attempt = 0 if moved else attempt + 1
            if loop.busy and not moved:
                self._transport.backoff(attempt, background=True)
