"""Summarises a monitored run as one row per rank: last values, mean times and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncddp.cli.report.monitor_log import MonitorLog, MonitorSample, finite_or_none


@dataclass(frozen=True)
class RankSummary:
    """Summary of one rank's measurements over a monitored run: one row of the report.

    Attributes:
        rank: The rank.
        steps: The last step that it has reported.
        reports: Number of its samples.
        consensus_distance: The last known value.
        gradient_norm: The last known value.
        step_seconds: Mean time of a step.
        exposed_share: Share of the step time in which averaging kept it from computing.
        bytes_per_step: Payload bytes sent per step.
        staleness: The largest value; None where the method waits.
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


def summarise_ranks(run: MonitorLog) -> list[RankSummary]:
    """Summarise each rank of a run."""
    return [_summarise_rank(rank, rows) for rank, rows in run.ranks.items()]


def slowest_rank(summaries: Sequence[RankSummary]) -> RankSummary:
    """Return the summary of the rank with the most time per step outside averaging.

    Where ranks wait for each other all steps take equally long; the rank that waits least is the
    one for which the others wait.
    """
    return max(summaries, key=lambda one: one.step_seconds * (1 - one.exposed_share))


def _summarise_rank(rank: int, rows: Sequence[MonitorSample]) -> RankSummary:
    first, last = rows[0], rows[-1]
    spent = sum(row.step_seconds for row in rows) or 1.0
    steps = last.step - first.step
    sent = last.bytes_sent - (first.bytes_sent if steps else 0)
    stale = [row.staleness for row in rows if row.staleness is not None]
    return RankSummary(
        rank=rank,
        steps=last.step,
        reports=len(rows),
        consensus_distance=_last_known([row.consensus_distance for row in rows]),
        gradient_norm=_last_known([row.gradient_norm for row in rows]),
        step_seconds=fmean(row.step_seconds for row in rows),
        exposed_share=sum(row.exposed_seconds for row in rows) / spent,
        bytes_per_step=sent / max(1, steps or last.step),
        staleness=max(stale, default=None),
        monitor_share=sum(row.monitor_seconds for row in rows) / spent,
    )


def _last_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if finite_or_none(value) is not None]
    return known[-1] if known else None
