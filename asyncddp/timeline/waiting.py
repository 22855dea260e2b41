"""What a thread is waiting for: the parts of its time in which nothing could go on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncddp.timeline.recorder import Recorder

__all__ = ["SOON", "Thread", "Waiting"]

SOON = 10_000
"""Nanoseconds: a shorter wait is none, and what is mixed so soon after belongs together."""


class Thread:
    """What the recorder keeps of one thread of its rank.

    Attributes:
        track: Where it is shown.
        waiting: What it is waiting for.
        mixes: How many times it has mixed.
        mix: What it has mixed last, until that is noted: begin, end, verb, name, bytes, peers.
    """

    def __init__(self, track: int) -> None:
        self.track = track
        self.waiting: Waiting | None = None
        self.mixes = 0
        self.mix: list[tuple[int, int, str, str, int, tuple[int, ...]]] = []


class Waiting:
    """A part of a thread's time in which it does nothing but wait, and mix what has come.

    Args:
        recorder: Takes the notes.
        verb: What is waited for.
        name: Under which name.
        peers: Whose part is awaited, as far as that is known beforehand.
    """

    def __init__(self, recorder: Recorder, verb: str, name: str, peers: Iterable[int] = ()) -> None:
        self._recorder, self._verb, self._name = recorder, verb, name
        self._thread = recorder.thread()
        self._peers: dict[int, None] = dict.fromkeys(peers)
        self._outer, self._thread.waiting = self._thread.waiting, self
        self._mixed = False
        self._since = time.monotonic_ns()
        if self._outer is not None:
            self._outer.went_on(self._since, self._since)

    @property
    def mixes(self) -> int:
        """How many times the thread has mixed."""
        return self._thread.mixes

    def late(self, peers: Iterable[int]) -> None:
        """These have yet to come; those of whom that is said last are the last to come."""
        for peer in peers:
            self._peers.pop(peer, None)
            self._peers[peer] = None

    def went_on(self, begin: int, end: int) -> None:
        """Something was mixed meanwhile."""
        self._note(begin)
        self._since, self._peers, self._mixed = end, {}, True

    def end(self) -> None:
        """It is over."""
        now = time.monotonic_ns()
        self._note(now)
        self._thread.waiting = self._outer
        if self._outer is not None:
            self._outer.went_on(now, now)
        self._recorder.settle(self._thread)

    def _note(self, until: int) -> None:
        if until - self._since < SOON or (self._mixed and not self._peers):
            return
        args: dict[str, Any] = {"verb": self._verb, "name": self._name, "for": list(self._peers)}
        track = self._thread.track
        self._recorder.span("wait", self._verb, self._since, until, args, track)
