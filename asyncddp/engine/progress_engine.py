"""Progress engine of one rank: runs submitted operations until they end, and bounds every wait."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from asyncddp.config import Config
from asyncddp.engine.active_messages import ActiveMessages
from asyncddp.engine.handle import Handle
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import (
    COLLECTIVE,
    DECODE_ERRORS,
    MACHINE_COLLECTIVE,
    MatchKey,
    PeerExit,
)
from asyncddp.engine.operation_context import OperationContext
from asyncddp.engine.progress_thread import ProgressThread
from asyncddp.engine.transfer_tracing import WaitTracer, trace_call
from asyncddp.engine.watchdog import Watchdog
from asyncddp.engine.work import OperationSpec, Work
from asyncddp.errors import (
    ArgumentError,
    AsyncDDPError,
    NotInitializedError,
    PeerError,
    WaitTimeoutError,
)
from asyncddp.timeline.profiler_range import profiler_enabled
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport

R = TypeVar("R")

_MAX_DEFERRED_AGE = 0.02  # seconds
_IDLE_INTERVAL = 0.05  # seconds
_SCAN_EVERY = 256  # rounds without progress after which the peers' rings are scanned
_FORKED = "this process was forked from"
_LIVE_ENGINES: weakref.WeakSet[ProgressEngine] = weakref.WeakSet()


def _after_fork() -> None:
    """Detach the engines that a child process inherited from its parent."""
    for engine in list(_LIVE_ENGINES):
        engine.detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SequenceNumber(NamedTuple):
    """Sequence number of one call: the key by which peers match it, and its round.

    Attributes:
        key: Its name, and how often that was used before.
        rounds: How often its verb was used under that name before: the round of a schedule.
    """

    key: MatchKey
    rounds: int


class ProgressEngine:
    """Engine that makes progress on all operations of one rank over one transport.

    A blocking verb is driven by the thread that calls it; a progress thread drives the operations
    in progress while no caller does. A thread that drives holds the lock for one round of progress
    at a time.

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
        self._submit_lock = threading.Lock()  # so that submitting never waits for a round
        self._queue: deque[Work[Any]] = deque()
        self._active: list[Work[Any]] = []
        self._round_counts: dict[tuple[str, str], int] = defaultdict(int)
        self._watchdog = Watchdog(config, self.matcher, self._submitted)
        self.fast_paths: dict[Any, Any] = {}
        """Fast paths of verbs, which the verbs fill and read."""
        self.deferred: dict[int, Any] = {}
        """Handles that no thread drives yet; those not waited for soon are submitted here."""
        self._progress_hooks: deque[Callable[[], bool]] = deque()
        self.idle_interval = _IDLE_INTERVAL
        """Seconds between two polls of the transport while nothing is in progress."""
        self._next_scan = 0.0
        self._last_caller = 0  # the thread that submitted last
        self.closed = False
        self._closed_because = "called after shutdown(); call init() first"
        self._failure: str | None = None
        self._progress_thread = (
            ProgressThread(self, transport)
            if transport.size > 1 and transport.allows_threads
            else None
        )
        _LIVE_ENGINES.add(self)

    # submitting

    def submit(
        self,
        spec: OperationSpec[R],
        sequence: SequenceNumber | None = None,
        about: Sequence[object] = (),
    ) -> Handle[R]:
        """Queue an operation for the progress thread; the arguments are as for :meth:`run`."""
        if (self.tracer is None and not profiler_enabled()) or sequence is not None:
            return self._submit(spec, sequence)
        with trace_call(self.tracer, spec.verb, spec.label, about):
            return self._submit(spec, None)

    def _submit(self, spec: OperationSpec[R], sequence: SequenceNumber | None) -> Handle[R]:
        work = self._enqueue(spec, sequence)
        if self._progress_thread is not None:
            self._progress_thread.wake()
        self.progress_unthreaded()
        return Handle(self, work)

    def run(
        self,
        spec: OperationSpec[R],
        sequence: SequenceNumber | None = None,
        about: Sequence[object] = (),
    ) -> R:
        """Run an operation on the calling thread and return its result.

        Args:
            spec: The operation.
            sequence: Its sequence number, if :meth:`count_use` has given one already.
            about: The arguments of the verb's call, for the timeline.
        """
        if (self.tracer is None and not profiler_enabled()) or sequence is not None:
            return Handle(self, self._enqueue(spec, sequence)).wait()
        with trace_call(self.tracer, spec.verb, spec.label, about):
            return Handle(self, self._enqueue(spec, None)).wait()

    def _enqueue(self, spec: OperationSpec[R], sequence: SequenceNumber | None = None) -> Work[R]:
        if not spec.match_name.isascii():
            _check_name(spec.verb, spec.match_name)
        with self._submit_lock:
            if sequence is None:
                step, rounds = self._count(spec.verb, spec.label, spec.match_name)
                sequence = SequenceNumber(MatchKey(spec.match_name, step), rounds)
            check = spec.check or self.config.check
            operation = OperationContext(self.matcher, spec.verb, *sequence, check=check)
            work = Work(spec, operation, self.config.timeout)
            self._queue.append(work)
        return work

    def count_use(self, verb: str, name: str, in_flight: deque[int]) -> int | None:
        """Count a use of a name, for a verb that begins without the engine.

        Args:
            verb: The verb.
            name: The name.
            in_flight: The list to which its step is added.

        Returns:
            The step, or None where the name is in use by something that must end first.

        Raises:
            NotInitializedError: After shutdown.
            PeerError: A peer has refused an earlier exchange that had ended here.
        """
        with self._submit_lock:
            if (self._queue or self._active) and self._is_in_progress(name):
                return None
            if self.matcher.is_refused(name):
                return None
            step = self._count(verb, name, name)[0]
            in_flight.append(step)
            return step

    def _is_in_progress(self, name: str) -> bool:
        """Tell whether an operation of a name is queued or in progress."""
        every = (*list(self._active), *list(self._queue), *list(self._active))
        return any(work.key.name == name for work in every)

    def use_count(self, name: str) -> int:
        """Return how often a name was used, which is its next step."""
        return self._use_counts[name]

    def round_count(self, verb: str, name: str) -> int:
        """Return how often a verb was used under a name."""
        return self._round_counts[verb, name]

    def _count(self, verb: str, label: str, name: str) -> tuple[int, int]:
        """Count a use of a name, and return its step and the verb's earlier uses of the name."""
        thread = threading.get_ident()
        if thread != self._last_caller:
            self._watchdog.register_caller()
            self._last_caller = thread
        if self._failure is not None:
            raise PeerError(f"rank {self.transport.rank}: {verb}: {self._failure}")
        if self.closed:
            self.ensure_open(verb)
        error = self.matcher.late_error
        if error is not None:
            self.matcher.channels.discard_error(error)
            raise error
        step, rounds = self._use_counts[name], self._round_counts[verb, label]
        self._use_counts[name] = step + 1
        self._round_counts[verb, label] = rounds + 1
        return step, rounds

    def ensure_open(self, what: str) -> None:
        """Raise after shutdown, and in a forked process.

        Args:
            what: The name of the call, for the message.

        Raises:
            NotInitializedError: After shutdown, or in a forked process.
        """
        if self.closed:
            raise NotInitializedError(f"{what}: {self._closed_because}")

    # one-sided

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

    # driving

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
                if attempt % _SCAN_EVERY == _SCAN_EVERY - 1:
                    self.progress_and_scan()
                if not work.finished.is_set():
                    self.transport.backoff(attempt)

    def progress_unthreaded(self) -> None:
        """Make one round of progress where there is no progress thread."""
        if self._progress_thread is None:
            self.progress()

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
            self._watchdog.mark_unreadable(peer, error, tell_next_verb=not expected)

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

    # shutdown and failure

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
            self._watchdog.readmit_peers()

    def has_exited(self, peer: int) -> bool:
        """Tell whether a peer has announced its exit, without having failed."""
        return self._watchdog.has_exited(peer)

    def mark_peer_failed(self, peer: int, reason: str) -> None:
        """Fail operations that need a failed peer, once messages sent before are handled."""
        self._watchdog.mark_failed(peer, reason)

    def use_counts(self) -> dict[str, int]:
        """Return how often each name was used; ranks whose counts are equal are in step."""
        return {name: count for name, count in self._use_counts.items() if count}

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


def _check_name(verb: str, name: str) -> None:
    """Raise if a name cannot be encoded in a message."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{verb}: argument name: expected a text that UTF-8 can encode, got {name!r}"
        ) from error
