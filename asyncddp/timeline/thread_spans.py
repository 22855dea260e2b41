"""Recording of one thread's timeline spans: averaging, operation calls and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from asyncddp.timeline.chrome_trace import Span

MERGE_GAP = 10_000
"""Nanoseconds: shorter waits are not recorded, and mixes this close together are one span."""


class _Mix(NamedTuple):
    verb: str
    name: str
    begin: int
    end: int
    nbytes: int
    peers: tuple[int, ...]


class ThreadTracingState:
    """Tracing state of a thread: its timeline row, innermost wait and averaging count."""

    def __init__(self, track: int, record: Callable[[Span], None]) -> None:
        self.track, self.record = track, record
        self.waiting: WaitSpan | None = None
        self.mixes = 0
        self._last_mix: list[_Mix] = []  # until it is recorded

    def record_mix(
        self, verb: str, name: str, begin: int, end: int, nbytes: int, peers: tuple[int, ...]
    ) -> None:
        """Record that the thread averaged a piece; merge consecutive pieces into one span."""
        self.mixes += 1
        if self.waiting is not None:
            self.waiting.exclude(begin, end)
        last = self._pop_mix()
        if last is not None:
            if begin - last.end < MERGE_GAP and (verb, name) == (last.verb, last.name):
                begin, nbytes = last.begin, nbytes + last.nbytes
            else:
                self._record_mix(last)
        self._last_mix.append(_Mix(verb, name, begin, end, nbytes, peers))

    def flush_mix(self) -> None:
        """Record the pending averaging span; any thread may call this."""
        if (last := self._pop_mix()) is not None:
            self._record_mix(last)

    def _pop_mix(self) -> _Mix | None:
        try:  # two threads may try at once
            return self._last_mix.pop()
        except IndexError:
            return None

    def _record_mix(self, mix: _Mix) -> None:
        verb, name, begin, end, nbytes, peers = mix
        args = {"verb": verb, "name": name, "bytes": nbytes, "peers": list(peers)}
        self.record(Span("mix", "mix", self.track, begin, end, args))


class WaitSpan:
    """Span in which a thread waits for tensors of ``peers``, and averages them as they arrive."""

    def __init__(
        self,
        thread: ThreadTracingState,
        verb: str,
        name: str,
        peers: Iterable[int] = (),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._thread, self._verb, self._name, self._ranks = thread, verb, name, ranks
        self._peers: dict[int, None] = dict.fromkeys(peers)
        self._outer, thread.waiting = thread.waiting, self
        self._mixed = False
        self._since = time.monotonic_ns()
        if self._outer is not None:
            self._outer.exclude(self._since, self._since)

    @property
    def mixes(self) -> int:
        """Number of pieces averaged by the thread so far."""
        return self._thread.mixes

    def note_missing(self, peers: Iterable[int]) -> None:
        """Note ranks with missing messages; the last noted are assumed to arrive last."""
        for peer in peers:
            self._peers.pop(peer, None)
            self._peers[peer] = None

    def exclude(self, begin: int, end: int) -> None:
        """Exclude from the wait a period of averaging."""
        self._record(begin)
        self._since, self._peers, self._mixed = end, {}, True

    def end(self) -> None:
        """End the wait and record it."""
        now = time.monotonic_ns()
        self._record(now)
        self._thread.waiting = self._outer
        if self._outer is not None:
            self._outer.exclude(now, now)
        self._thread.flush_mix()

    def _record(self, until: int) -> None:
        if until - self._since < MERGE_GAP or (self._mixed and not self._peers):
            return
        peers = [peer if self._ranks is None else self._ranks[peer] for peer in self._peers]
        args: dict[str, Any] = {"verb": self._verb, "name": self._name, "for": peers}
        thread = self._thread
        thread.record(Span("wait", self._verb, thread.track, self._since, until, args))


class CallSpan:
    """Context manager that records the call of a communication operation as a timeline span."""

    def __init__(
        self,
        thread: ThreadTracingState,
        name: str,
        args: Mapping[str, Any],
        profiler_range: AbstractContextManager[None],
    ) -> None:
        self._thread, self._name, self._args, self._range = thread, name, args, profiler_range

    def discard(self) -> None:
        """Discard the span because the call did nothing."""
        self._args = {}

    def __enter__(self) -> CallSpan:
        self._range.__enter__()
        self._begin = time.monotonic_ns()
        return self

    def __exit__(self, *error: Any) -> None:
        end, thread = time.monotonic_ns(), self._thread
        thread.flush_mix()
        if self._args:
            thread.record(Span("enqueue", self._name, thread.track, self._begin, end, self._args))
        self._range.__exit__(*error)
