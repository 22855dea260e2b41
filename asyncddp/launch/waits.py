"""Warnings of ranks that wait, gathered for a moment and shown once for all of them.

Where one rank is late, its neighbours wait for it, their neighbours for them, and each says so.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from asyncddp.rank_lists import list_ranks, parse_ranks

__all__ = ["WAITING", "Waits"]

WAITING = re.compile(
    r"rank (?P<rank>\d+): (?P<what>.+) has been waiting for (?P<seconds>\d+) s; "
    r"missing: (?P<missing>ranks? [\d, \u2013]+)"
)
_GATHER = 1.5  # seconds from the first warning to the moment when all are shown


@dataclass(frozen=True)
class _Wait:
    line: str
    rank: int
    what: str
    seconds: int
    missing: frozenset[int]


class Waits:
    """Gathers lines that fit :data:`WAITING`.

    Example:
        >>> waits = Waits()
        >>> for rank, other in ((0, 1), (1, 2)):
        ...     waits.add(f"rank {rank}: barrier has been waiting for 60 s; missing: rank {other}")
        >>> waits.release()
        ['2 ranks (0, 1) wait for rank 2, in barrier, since 60 s']
    """

    def __init__(self) -> None:
        self._held: list[_Wait] = []
        self._since = 0.0

    @property
    def due(self) -> bool:
        """Whether the first of those that are held is old enough."""
        return bool(self._held) and time.monotonic() - self._since >= _GATHER

    @property
    def holds(self) -> bool:
        """Whether there is something to be shown."""
        return bool(self._held)

    def add(self, line: str) -> None:
        """Hold a line back."""
        match = WAITING.fullmatch(line)
        if match is not None:
            self._since = self._since if self._held else time.monotonic()
            missing = frozenset(parse_ranks(match["missing"]))
            rank, seconds = int(match["rank"]), int(match["seconds"])
            self._held.append(_Wait(line, rank, match["what"], seconds, missing))

    def release(self) -> list[str]:
        """Give what is to be shown: one line, or each as it was without a common cause."""
        held, self._held = self._held, []
        waiting = {wait.rank for wait in held}
        late = {rank for wait in held for rank in wait.missing} - waiting
        if len(waiting) < 2 or not late:
            return [wait.line for wait in held]
        first = min((wait for wait in held if wait.missing & late), key=lambda wait: wait.rank)
        who = list_ranks(waiting).partition(" ")[2]
        since = max(wait.seconds for wait in held)
        return [
            f"{len(waiting)} ranks ({who}) wait for {list_ranks(late)}, in {first.what}, since "
            f"{since} s"
        ]
