"""Validation of the arguments of ``monitor``."""

from __future__ import annotations

from asyncddp.errors import ArgumentError, UsageError
from asyncddp.monitoring.monitor_targets import MonitorTarget

MONITORS_KEY = "monitors"
"""Key in a context's extensions of its monitors, by the labels of their targets."""
_CONSENSUS = ("projection", "exact", None)


def check_monitor_arguments(
    target: MonitorTarget, every: int, consensus: str | None, first_step: int
) -> None:
    """Check the arguments of ``monitor``.

    Raises:
        ArgumentError: An invalid value.
        UsageError: The target is monitored already.
    """
    if not isinstance(every, int) or every < 1:
        raise ArgumentError(f"monitor: argument every: expected at least 1 step, got {every!r}")
    if not isinstance(first_step, int) or first_step < 0:
        raise ArgumentError(
            f"monitor: argument first_step: expected the number of steps made before, got "
            f"{first_step!r}"
        )
    if consensus not in _CONSENSUS:
        raise ArgumentError(
            "monitor: argument consensus: expected 'projection', 'exact' or None, got "
            f"{consensus!r}"
        )
    if consensus == "exact" and not target.in_step:
        raise ArgumentError(
            "monitor: argument consensus: 'exact' lets all ranks wait for each other, which a "
            "one-sided method is there to avoid; use 'projection', or call consensus_distance "
            "where ranks meet anyway"
        )
    if target.label in target.context.extensions.get(MONITORS_KEY, {}):
        raise UsageError(
            f"monitor: {target.label} is monitored already; give that monitor a list of places as "
            "`to`, or close it first"
        )
