"""Spans of time in which a traced thread waits for messages of other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncddp.timeline.tracer import Tracer

MERGE_GAP = 10_000
"""Nanoseconds: shorter waits are not recorded, and mixes this close together are one span."""


class TracedThread:
    """State that the tracer keeps of one thread of its rank.

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


class WaitSpan:
    """A span of time in which a thread only waits, and mixes what has arrived.

    Args:
        tracer: Records the spans.
        verb: The verb whose completion is awaited.
        name: The name of the operation.
        peers: The ranks whose messages are awaited, as far as known beforehand.
    """

    def __init__(self, tracer: Tracer, verb: str, name: str, peers: Iterable[int] = ()) -> None:
        self._tracer, self._verb, self._name = tracer, verb, name
        self._thread = tracer.current_thread()
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
        self._tracer.flush_mix(self._thread)

    def _record(self, until: int) -> None:
        if until - self._since < MERGE_GAP or (self._mixed and not self._peers):
            return
        args: dict[str, Any] = {"verb": self._verb, "name": self._name, "for": list(self._peers)}
        track = self._thread.track
        self._tracer.record_span("wait", self._verb, self._since, until, args, track)
