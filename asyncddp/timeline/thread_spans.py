"""Timeline spans of one thread: its calls of communication operations, and its waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from asyncddp.timeline.chrome_trace import Span

MERGE_GAP = 10_000
"""Nanoseconds: shorter waits are not recorded, and mixes this close together are one span."""


class TracedThread:
    """State that a rank's tracer keeps for one of the rank's threads.

    Attributes:
        track: The row of the timeline on which the thread is shown.
        waiting: The innermost wait under way, or None.
        mixes: How many times the thread has mixed.
        mix: The last mix span until it is recorded: begin, end, verb, name, bytes, peers.
    """

    def __init__(self, track: int) -> None:
        self.track = track
        self.waiting: WaitSpan | None = None
        self.mixes = 0
        self.mix: list[tuple[int, int, str, str, int, tuple[int, ...]]] = []


class SpanRecorder(Protocol):
    """Interface of a rank's tracer, by which calls and waits record their spans."""

    def current_thread(self) -> TracedThread:
        """Return the state of the calling thread."""
        ...

    def record(self, event: Span) -> None:
        """Record a span."""
        ...

    def flush_mix(self, thread: TracedThread) -> None:
        """Record the last mix span of a thread."""
        ...

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that names its block in profilers."""
        ...


class WaitSpan:
    """Span in which a thread waits for tensors of other ranks, and averages them as they arrive.

    Args:
        recorder: Records the spans.
        verb: The verb whose completion is awaited.
        name: The name of the operation.
        peers: The ranks whose messages are awaited, as far as known beforehand.
    """

    def __init__(
        self, recorder: SpanRecorder, verb: str, name: str, peers: Iterable[int] = ()
    ) -> None:
        self._recorder, self._verb, self._name = recorder, verb, name
        self._thread = recorder.current_thread()
        self._peers: dict[int, None] = dict.fromkeys(peers)
        self._outer, self._thread.waiting = self._thread.waiting, self
        self._mixed = False
        self._since = time.monotonic_ns()
        if self._outer is not None:
            self._outer.exclude(self._since, self._since)

    @property
    def mixes(self) -> int:
        """Number of times that the thread has mixed."""
        return self._thread.mixes

    def note_missing(self, peers: Iterable[int]) -> None:
        """Note ranks whose messages are missing; those noted last are taken to arrive last."""
        for peer in peers:
            self._peers.pop(peer, None)
            self._peers[peer] = None

    def exclude(self, begin: int, end: int) -> None:
        """Exclude a time in which the thread mixed from the wait."""
        self._record(begin)
        self._since, self._peers, self._mixed = end, {}, True

    def end(self) -> None:
        """End the wait and record it."""
        now = time.monotonic_ns()
        self._record(now)
        self._thread.waiting = self._outer
        if self._outer is not None:
            self._outer.exclude(now, now)
        self._recorder.flush_mix(self._thread)

    def _record(self, until: int) -> None:
        if until - self._since < MERGE_GAP or (self._mixed and not self._peers):
            return
        args: dict[str, Any] = {"verb": self._verb, "name": self._name, "for": list(self._peers)}
        track = self._thread.track
        self._recorder.record(Span("wait", self._verb, track, self._since, until, args))


class CallSpan:
    """Context manager that records the call of a communication operation as a timeline span.

    Args:
        recorder: Records the span.
        verb: The verb.
        name: The name of the operation.
        nbytes: Size of the tensor in bytes.
    """

    def __init__(self, recorder: SpanRecorder, verb: str, name: str, nbytes: int) -> None:
        self._recorder = recorder
        self._capitals = verb.upper()
        op = f"MPI_{self._capitals}"  # what scripts of BlueFog look for
        self._args = {"verb": verb, "name": name, "bytes": nbytes, "op": op}

    def discard(self) -> None:
        """Discard the span, because the call did nothing."""
        self._args = {}

    def __enter__(self) -> CallSpan:
        self._range = self._recorder.profiler_range(f"ENQUEUE_{self._capitals}")
        self._range.__enter__()
        self._begin = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        end = time.monotonic_ns()
        thread = recorder.current_thread()
        recorder.flush_mix(thread)
        name = f"ENQUEUE_{self._capitals}"
        if self._args:
            recorder.record(Span("enqueue", name, thread.track, self._begin, end, self._args))
        self._range.__exit__(kind, error, trace)
