"""Timing of training steps: mean seconds per step between two monitor reports."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from asyncddp.algorithms.averager_state import CumulativeTimer
from asyncddp.monitoring.monitor_targets import MonitorTarget


class StepTimes(NamedTuple):
    """Mean seconds per step: in total, in averaging on the caller's thread, in monitoring."""

    step: float
    exposed: float
    monitor: float


class StepTimer:
    """Timer of the mean time per training step since the last monitor report.

    Args:
        target: The optimizer or module that makes the steps.
        cost: Timer of the time for monitoring.
        step: Steps made so far.
    """

    def __init__(self, target: MonitorTarget, cost: CumulativeTimer, step: int) -> None:
        self._target, self._cost = target, cost
        self._last = self._now(step)

    def _now(self, step: int) -> tuple[int, float, float, float]:
        return step, perf_counter(), self._target.exposed_seconds, self._cost.seconds

    def next_interval(self, step: int) -> StepTimes:
        """Return the means since the last call, and begin the next interval."""
        now, last = self._now(step), self._last
        self._last = now
        steps, *seconds = (one - other for one, other in zip(now, last, strict=True))
        return StepTimes(*(second / steps for second in seconds))
