"""Progress engine of one rank: accepts operations, and counts the uses of each name."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from asyncddp.config import Config
from asyncddp.deadline import Deadline
from asyncddp.engine.active_messages import ActiveMessageDispatcher
from asyncddp.engine.elastic_progress import ElasticProgress
from asyncddp.engine.handle import Handle
from asyncddp.engine.messages import ExitAnnouncement, MatchKey
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.engine.short_messages import ShortMessageHandle
from asyncddp.engine.tracing import NO_TRACING, EngineTracing
from asyncddp.engine.work import OperationSpec, Work
from asyncddp.errors import NotInitializedError, PeerLeftError
from asyncddp.membership import View
from asyncddp.timeline.profiler_range import ProfilerRange
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport

R = TypeVar("R")

_FORKED = "this process was forked from"
_LIVE_ENGINES: weakref.WeakSet[ProgressEngine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_LIVE_ENGINES):
        engine.detach_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class ProgressEngine(ElasticProgress):
    """Engine that runs all operations of one rank over one transport, with its progress loop.

    Attributes:
        config: Deadlines and the check mode.
        fast_paths: Fast paths of verbs, which the verbs fill and read.
        submit_lock: Held while operations are counted and queued.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        tracer: Tracer | None = None,
        agreement: ReplicaAgreement | None = None,
    ) -> None:
        tracing = EngineTracing(tracer) if tracer else NO_TRACING
        super().__init__(transport, config, tracing, agreement)
        self.config, self._channels = config, self.matcher.channels
        self._round_counts: dict[tuple[str, str], int] = defaultdict(int)
        self._last_caller = 0  # the thread that submitted last
        self.fast_paths: dict[Any, Any] = {}
        _LIVE_ENGINES.add(self)

    # submitting

    def submit(
        self, spec: OperationSpec[R], key: MatchKey | None = None, about: Sequence[object] = ()
    ) -> Handle[R]:
        """Submit an operation, and return its handle; ``key`` is given if its use was counted."""
        if key is None and (span := self._call_span(spec, about)) is not None:
            with span:
                return self._submit(spec, None)
        return self._submit(spec, key)

    def _submit(self, spec: OperationSpec[R], key: MatchKey | None) -> Handle[R]:
        if key is None and (short := self._start_short(spec)) is not None:
            return short
        work = self._enqueue(spec, key)
        if self.thread is None or self.closed:
            self.progress()
        else:
            self.thread.wake()
        return Handle(self, work)

    def run(self, spec: OperationSpec[R], about: Sequence[object] = ()) -> R:
        """Run an operation in the calling thread, and return its result."""
        span = self._call_span(spec, about)
        if span is not None:
            with span:
                return Handle(self, self._enqueue(spec)).wait()
        short = self._start_short(spec)
        return (Handle(self, self._enqueue(spec)) if short is None else short).wait()

    def _start_short(self, spec: OperationSpec[R]) -> Handle[R] | None:
        """Start an operation that is a single short message; None if it needs the engine."""
        message = spec.message
        if message is None or spec.check or self.config.check or self.tracer is not None:
            return None
        if self.deferred.unsent:
            self.deferred.send()
        with self.submit_lock:
            step, rounds = self.count(spec.verb, spec.label, spec.match_name)
        key = MatchKey(spec.match_name, step)
        handle = ShortMessageHandle(
            self, spec, message, key, partial(self._go_on, spec, key, rounds)
        )
        handle.begin()
        return handle

    def _go_on(self, spec: OperationSpec[R], key: MatchKey, rounds: int) -> Handle[R]:
        """Submit an operation whose use of a name was counted before."""
        work = self.add(spec, key, rounds)
        if self.thread is not None:
            self.thread.wake()
        return Handle(self, work)

    def _call_span(
        self, spec: OperationSpec[R], about: Sequence[object]
    ) -> AbstractContextManager[object] | None:
        """Return a context manager that records a call with arguments ``about``, or None."""
        if self.tracer is None:
            on = profiler._is_profiler_enabled
            return ProfilerRange(f"ENQUEUE_{spec.verb.upper()}") if on else None
        nbytes = next((one.nbytes for one in about if isinstance(one, torch.Tensor)), 0)
        return self.tracer.enqueue_span(spec.verb, spec.label, nbytes)

    def _enqueue(self, spec: OperationSpec[R], key: MatchKey | None = None) -> Work[R]:
        rounds = 0
        if self.deferred.unsent:
            self.deferred.send()
        with self._count_lock if spec.begun or key is not None else self.submit_lock:
            spec = self.planned_for_view(spec)
            name = spec.match_name
            if key is None:
                step, rounds = self.count(spec.verb, spec.label, name)
                key = MatchKey(name, step)
            return self.add(spec, key, rounds)

    def planned_for_view(self, spec: OperationSpec[R]) -> OperationSpec[R]:
        """Return a collective's plan for the members of this view; holds ``submit_lock``."""
        if spec.again is None or spec.match_name == self._collective:
            return spec
        return spec.again()

    def add(self, spec: OperationSpec[R], key: MatchKey, rounds: int) -> Work[R]:
        """Queue an operation whose use of a name was counted; holds ``submit_lock``."""
        check = spec.check or self.config.check
        operation = OperationExchanges(
            self.matcher, spec.verb, key, rounds, check=check, members=spec.members
        )
        members = () if self.membership is None else self.membership.view.members
        work = Work(spec, operation, Deadline(self.config, spec.timeout), members)
        self.queue.append(work)
        return work

    # counting

    def is_free(self, sequence: str | None) -> bool:
        """Return whether no operation of a sequence is in progress; holds ``submit_lock``."""
        if not (self.queue or self.active):  # from the former to the latter, where it is in both
            return True
        every = (*list(self.active), *list(self.queue), *list(self.active))
        return all(work.sequence != sequence for work in every)

    def count_use(
        self, verb: str, name: str, in_flight: deque[int], view: View | None = None
    ) -> int | None:
        """Count a use of a name for an operation that starts without the engine; return its step.

        The step is None if another operation of this name must end first, or if the operation was
        planned for a view that is, or may be, over.
        """
        if self.deferred.unsent:
            self.deferred.send()
        self.enter(verb)
        return self.count_uses([(verb, name, in_flight)], view)[0]

    def count_uses(
        self, calls: Iterable[tuple[str, str, deque[int]]], view: View | None = None
    ) -> list[int | None]:
        """Count uses of names for several operations that start without the engine.

        :meth:`enter` was called before. Returns each operation's step as :meth:`count_use` does. In
        elastic runs they are parts of rounds that have begun.
        """
        counts, rounds, refused = self._use_counts, self._round_counts, self.matcher.refused
        steps: list[int | None] = []
        with self._count_lock:
            if view is not None and not self._is_current(view):
                return [None for _ in calls]
            busy: Collection[str] = ()
            if self.queue or self.active:  # from the former to the latter, where it is in both
                every = (*list(self.active), *list(self.queue), *list(self.active))
                busy = {work.key.name for work in every}
            for verb, name, in_flight in calls:
                step = counts[name]
                if name in busy or (refused and MatchKey(name, step) in refused):
                    steps.append(None)
                    continue
                counts[name] = step + 1
                rounds[verb, name] += 1
                in_flight.append(step)
                steps.append(step)
        return steps

    def use_count(self, name: str) -> int:
        """Return the number of uses of a name, which is its next step."""
        return self._use_counts[name]

    def use_counts(self) -> dict[str, int]:
        """Return the number of uses of each name; ranks with equal counts are in step."""
        self.deferred.send()
        return {name: count for name, count in self._use_counts.items() if count}

    def round_count(self, verb: str, name: str) -> int:
        """Return the number of uses of a name by one verb, which is the round of a schedule."""
        if name in self.deferred.names:
            self.deferred.send()
        return self._round_counts[verb, name]

    def enter(self, verb: str) -> None:
        """Begin a call of a verb; raise a stored late error, or an error after shutdown."""
        thread = threading.get_ident()
        if thread != self._last_caller:
            self.watchdog.callers.add(threading.current_thread())
            self._last_caller = thread
        if self.closed:
            self.ensure_open(verb)
        if self._channels.late_error is not None:
            self._channels.raise_late_error()

    def count(self, verb: str, label: str, name: str) -> tuple[int, int]:
        """Count a use of a name; return its step and the number of the verb's earlier uses."""
        self.enter(verb)
        step, rounds = self._use_counts[name], self._round_counts[verb, label]
        self._use_counts[name] = step + 1
        self._round_counts[verb, label] = rounds + 1
        return step, rounds

    # one-sided operations

    @contextmanager
    def active_messages(self) -> Iterator[ActiveMessageDispatcher]:
        """Lock the engine, give access to its active messages, and flush them at the end."""
        with self.lock:
            self.ensure_open("a one-sided operation")
            yield self.matcher.active_messages
            self.matcher.sends.flush()

    def add_progress_hook(self, hook: Callable[[], bool]) -> None:
        """Add a hook: a function that is called in every round of progress until it returns True.

        It must neither raise nor wait, not even for a lock whose owner may wait for the engine.
        """
        self.hooks.append(hook)
        if self.thread is not None:
            self.thread.wake()

    # life cycle

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the engine's process."""
        return self.closed_because.startswith(_FORKED)

    def announce_exit(self, reason: str) -> None:
        """Announce to all peers that this rank submits nothing more, so that none waits for it."""
        self.deferred.send()
        with self.lock:
            self.progress()
            uses = list(self._use_counts.items())
            counts = {name: count for name, count in uses if MatchKey(name, count).collective}
            if not self.closed:
                self._tell_peers_of_exit(ExitAnnouncement(reason, counts))

    def readmit_peers(self) -> None:
        """Undo :meth:`announce_exit` of all ranks; no rank may submit operations meanwhile."""
        with self.lock:
            self.progress()
            self.lost_peers.readmit()
            self.matcher.readmit()

    def detach_after_fork(self) -> None:
        """Close the engine in a forked child process, leaving the rank to the parent process.

        Nothing is sent. Operations in progress and all later calls end with an error. Locks that
        another thread may have held at the fork are replaced.
        """
        self.thread, self.closed = None, True
        self.lock, self.submit_lock = threading.RLock(), threading.Lock()
        self._count_lock = threading.Lock()
        self.closed_because = why = (
            f"{_FORKED} rank {self.transport.rank} (process {os.getppid()}), which alone may "
            "communicate. Call verbs in the process that called init(), or start this one with "
            'multiprocessing.get_context("spawn")'
        )
        for work in (*self.active, *self.queue):
            work.end_after_fork(NotInitializedError(f"{work.describe()}: {why}"))
        self.deferred.end_after_fork(why)
        for pending in (self.active, self.queue, self.hooks):
            pending.clear()

    def close(self, reason: str) -> None:
        """Stop the progress thread, fail operations in progress, and announce this rank's exit.

        Raises a stored late error, such as that of a peer which refused an exchange after it had
        ended on this rank, unless it is a PeerLeftError.
        """
        if self.thread is not None:
            self.thread.stop()
        with self.lock:
            if self.closed:
                return
            self.deferred.hand_to_engine(0.0)
            self.announce_exit(reason)
            if not self.closed:
                self._end("shut down before its end")
        late = self._channels.late_error
        if late is not None and not isinstance(late, PeerLeftError):
            raise late
