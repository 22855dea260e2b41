"""A monitored run in a few figures per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncddp.launch.report.records import Row, Run, finite

__all__ = ["Summary", "slowest", "summarise"]


@dataclass(frozen=True)
class Summary:
    """One rank's run.

    Attributes:
        rank: The rank.
        steps: The last step that it has reported.
        reports: How many reports there are of it.
        consensus_distance: The last one that is known.
        gradient_norm: The same.
        step_seconds: Mean time of a step.
        exposed_share: Share of that in which averaging kept its thread.
        bytes_per_step: Payload bytes sent.
        staleness: The largest; None where the method waits.
        monitor_share: Share of a step's time that monitoring took.
    """

    rank: int
    steps: int
    reports: int
    consensus_distance: float | None
    gradient_norm: float | None
    step_seconds: float
    exposed_share: float
    bytes_per_step: float
    staleness: float | None
    monitor_share: float


def summarise(run: Run) -> list[Summary]:
    """One summary per rank."""
    return [_summary(rank, rows) for rank, rows in run.ranks.items()]


def slowest(summaries: Sequence[Summary]) -> Summary:
    """The rank that spends the most time per step on anything but averaging.

    Where ranks wait for each other all steps take equally long; what a rank does not wait is what
    the others wait for.
    """
    return max(summaries, key=lambda one: one.step_seconds * (1 - one.exposed_share))


def _summary(rank: int, rows: Sequence[Row]) -> Summary:
    first, last = rows[0], rows[-1]
    spent = sum(row.step_seconds for row in rows) or 1.0
    steps = last.step - first.step
    sent = last.bytes_sent - (first.bytes_sent if steps else 0)
    stale = [row.staleness for row in rows if row.staleness is not None]
    return Summary(
        rank=rank,
        steps=last.step,
        reports=len(rows),
        consensus_distance=_last([row.consensus_distance for row in rows]),
        gradient_norm=_last([row.gradient_norm for row in rows]),
        step_seconds=fmean(row.step_seconds for row in rows),
        exposed_share=sum(row.exposed_seconds for row in rows) / spent,
        bytes_per_step=sent / max(1, steps or last.step),
        staleness=max(stale, default=None),
        monitor_share=sum(row.monitor_seconds for row in rows) / spent,
    )


def _last(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if finite(value) is not None]
    return known[-1] if known else None
