"""How long steps take, from one report to the next."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from asyncddp.algorithms.stopwatch import Stopwatch
from asyncddp.monitoring.subjects import Subject

__all__ = ["Lap", "Pace"]


class Lap(NamedTuple):
    """Mean seconds per step: from step to step, of that exposed, of that for monitoring."""

    step: float
    exposed: float
    monitor: float


class Pace:
    """Means over the steps since the last report.

    Args:
        subject: What makes the steps.
        cost: Adds up the time for monitoring.
        step: Steps made so far.
    """

    def __init__(self, subject: Subject, cost: Stopwatch, step: int) -> None:
        self._subject, self._cost = subject, cost
        self._last = self._now(step)

    def _now(self, step: int) -> tuple[int, float, float, float]:
        return step, perf_counter(), self._subject.exposed_seconds, self._cost.seconds

    def lap(self, step: int) -> Lap:
        """The means up to this step; the next begin here."""
        now, last = self._now(step), self._last
        self._last = now
        steps, *seconds = (one - other for one, other in zip(now, last, strict=True))
        return Lap(*(second / steps for second in seconds))
