"""Detection of neighbours that have left asynchronous averaging, from their step counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

CONCLUDED = 1 << 62
"""Added to the published step count of a rank that makes no more steps: it is never behind."""

_SILENT = 100  # rounds without a new step after which a neighbour has left, at least …
_USUAL = 20  # … and as a multiple of the rounds that it usually takes for a step


@dataclass
class _NeighborStepCount:
    """A neighbour's step count, and this rank's round in which the count last changed."""

    step: int
    since: int
    first: int
    steps: int = 0


class DepartureDetector:
    """Detector of neighbours that have left asynchronous averaging, judging by their step counts.

    A neighbour has left if it has made fewer steps than this rank and makes no more: its step count
    contains :data:`CONCLUDED`, or it is ``gone`` from the world, or its count has not changed for
    more than 100 rounds of this rank, and for 20 times as many rounds as its steps usually take. A
    neighbour that makes a step again has not left any more. A neighbour that has ``failed`` has
    left at once. ``now`` is the last result of :meth:`look`.
    """

    def __init__(self, gone: Callable[[int], bool], failed: Callable[[int], bool]) -> None:
        self._gone, self._failed = gone, failed
        self._rounds = 0
        self._known: dict[int, _NeighborStepCount] = {}
        self.now: tuple[int, ...] = ()

    def look(self, own: int, steps: Mapping[int, int]) -> tuple[int, ...]:
        """Return the neighbours that have left, ascending, given their newest known step counts.

        Call it once in each round of this rank, which has made ``own`` steps.
        """
        self._rounds += 1
        self.now = tuple(r for r in sorted(steps) if self._has_left(r, steps[r], own))
        return self.now

    def _has_left(self, rank: int, step: int, own: int) -> bool:
        concluded, step = divmod(step, CONCLUDED)
        known = self._known.get(rank)
        if known is None:
            known = self._known[rank] = _NeighborStepCount(step, self._rounds, self._rounds)
        if step != known.step:
            known.steps += max(1, step - known.step)
            known.step, known.since = step, self._rounds
        if own <= step or self._failed(rank):
            return self._failed(rank)
        usual = (known.since - known.first) / known.steps if known.steps else 1.0
        silent = self._rounds - known.since > max(_SILENT, _USUAL * usual)
        return bool(concluded) or silent or self._gone(rank)
