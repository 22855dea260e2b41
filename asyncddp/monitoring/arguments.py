"""What a monitor refuses, before anything is sent."""

from __future__ import annotations

from asyncddp.errors import ArgumentError, UsageError
from asyncddp.monitoring.subjects import Subject

__all__ = ["MONITORS", "check"]

MONITORS = "monitors"
"""Where a world keeps its monitors, by the labels of their subjects."""
_CONSENSUS = ("projection", "exact", None)


def check(subject: Subject, every: int, consensus: str | None, first_step: int) -> None:
    """Refuse what cannot be.

    Raises:
        ArgumentError: A value that cannot be served.
        UsageError: It is monitored already.
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
    if consensus == "exact" and not subject.in_step:
        raise ArgumentError(
            "monitor: argument consensus: 'exact' lets all ranks wait for each other, which a "
            "one-sided method is there to avoid; use 'projection', or call consensus_distance "
            "where ranks meet anyway"
        )
    if subject.label in subject.context.attachments.get(MONITORS, {}):
        raise UsageError(
            f"monitor: {subject.label} is monitored already; give that monitor a list of places as "
            "`to`, or close it first"
        )
