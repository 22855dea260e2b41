"""Progress engine of one rank: runs submitted operations until they end, and bounds every wait."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from asyncddp.config import Config
from asyncddp.engine.call_tracing import trace_call
from asyncddp.engine.engine_lifecycle import EngineLifecycle
from asyncddp.engine.handle import Handle
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.engine.work import OperationSpec, Work
from asyncddp.errors import ArgumentError, PeerError
from asyncddp.timeline.profiler_range import profiler_enabled
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Transport

R = TypeVar("R")


class CallSequence(NamedTuple):
    """Sequence numbers of one call: the key that matches it on all ranks, and its repeat count.

    Attributes:
        key: Its name, and how often that was used before.
        rounds: How often its verb was used under that name before: the round of a schedule.
    """

    key: MatchKey
    rounds: int


class ProgressEngine(EngineLifecycle):
    """Engine that makes progress on all operations of one rank over one transport.

    This class counts and submits operations; its base classes drive them and end the engine.

    Args:
        transport: The transport that carries messages and tensors.
        config: Deadlines and the check mode.
        tracer: The timeline's tracer, if there is one.
    """

    def __init__(self, transport: Transport, config: Config, tracer: Tracer | None = None) -> None:
        super().__init__(transport, config, tracer)
        self._round_counts: dict[tuple[str, str], int] = defaultdict(int)
        self.fast_paths: dict[Any, Any] = {}
        """Fast paths of verbs, which the verbs fill and read."""
        self._last_caller = 0  # the thread that submitted last

    # submitting

    def submit(
        self,
        spec: OperationSpec[R],
        sequence: CallSequence | None = None,
        about: Sequence[object] = (),
    ) -> Handle[R]:
        """Queue an operation for the progress thread; the arguments are as for :meth:`run`."""
        if (self.tracer is None and not profiler_enabled()) or sequence is not None:
            return self._submit(spec, sequence)
        with trace_call(self.tracer, spec.verb, spec.label, about):
            return self._submit(spec, None)

    def _submit(self, spec: OperationSpec[R], sequence: CallSequence | None) -> Handle[R]:
        work = self._enqueue(spec, sequence)
        if self._progress_thread is not None:
            self._progress_thread.wake()
        self.progress_unthreaded()
        return Handle(self, work)

    def run(
        self,
        spec: OperationSpec[R],
        sequence: CallSequence | None = None,
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

    def _enqueue(self, spec: OperationSpec[R], sequence: CallSequence | None = None) -> Work[R]:
        if not spec.match_name.isascii():
            _check_name(spec.verb, spec.match_name)
        with self._submit_lock:
            if sequence is None:
                step, rounds = self._count(spec.verb, spec.label, spec.match_name)
                sequence = CallSequence(MatchKey(spec.match_name, step), rounds)
            check = spec.check or self.config.check
            operation = OperationExchanges(self.matcher, spec.verb, *sequence, check=check)
            work = Work(spec, operation, self.config.timeout)
            self._queue.append(work)
        return work

    # counting

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

    def use_counts(self) -> dict[str, int]:
        """Return how often each name was used; ranks whose counts are equal are in step."""
        return {name: count for name, count in self._use_counts.items() if count}

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


def _check_name(verb: str, name: str) -> None:
    """Raise if a name cannot be encoded in a message."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{verb}: argument name: expected a text that UTF-8 can encode, got {name!r}"
        ) from error
