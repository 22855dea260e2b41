"""Merges the "has been waiting" warnings of many ranks into one line that names the late rank.

Where one rank is late, its neighbours wait for it and theirs for them, and each prints a warning.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from asyncddp.rank_lists import list_ranks, parse_ranks

WAIT_WARNING = re.compile(
    r"rank (?P<rank>\d+): (?P<what>.+) has been waiting for (?P<seconds>\d+) s; "
    r"missing: (?P<missing>ranks? [\d, \u2013]+)"
)
_COLLECTION_TIME = 1.5  # seconds from the first warning until all are shown


@dataclass(frozen=True)
class _ParsedWaitWarning:
    """Parsed warning of a waiting rank: its operation, how long, and the missing ranks."""

    line: str
    rank: int
    what: str
    seconds: int
    missing: frozenset[int]


class WaitWarningAggregator:
    """Collector of the ranks' "has been waiting" warnings, merged after a short delay.

    Example:
        >>> aggregator = WaitWarningAggregator()
        >>> for rank, other in ((0, 1), (1, 2)):
        ...     aggregator.add(
        ...         f"rank {rank}: barrier has been waiting for 60 s; missing: rank {other}"
        ...     )
        >>> aggregator.flush()
        ['2 ranks (0, 1) wait for rank 2, in barrier, since 60 s']
    """

    def __init__(self) -> None:
        self._held: list[_ParsedWaitWarning] = []
        self._since = 0.0

    @property
    def due(self) -> bool:
        """True if the oldest collected warning has waited long enough to be shown."""
        return bool(self._held) and time.monotonic() - self._since >= _COLLECTION_TIME

    @property
    def has_pending(self) -> bool:
        """True if warnings have been collected and not shown."""
        return bool(self._held)

    def add(self, line: str) -> None:
        """Collect a line if it is a waiting warning."""
        match = WAIT_WARNING.fullmatch(line)
        if match is not None:
            self._since = self._since if self._held else time.monotonic()
            missing = frozenset(parse_ranks(match["missing"]))
            rank, seconds = int(match["rank"]), int(match["seconds"])
            self._held.append(_ParsedWaitWarning(line, rank, match["what"], seconds, missing))

    def flush(self) -> list[str]:
        """Return one merged line, or all lines unchanged if there is no common cause."""
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
