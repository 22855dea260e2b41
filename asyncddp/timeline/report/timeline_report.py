"""Report of each rank's time, of the ranks that delay others, and of missing information."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncddp.errors import ArgumentError
from asyncddp.rank_list_text import list_ranks
from asyncddp.timeline.report.rank_breakdown import RankBreakdown, compute_breakdown
from asyncddp.timeline.report.trace_spans import RankSpans, TimelineSpans


@dataclass(frozen=True)
class TimelineReport:
    """Breakdown of every rank's time, and how long the other ranks waited for each rank."""

    size: int
    ranks: tuple[RankBreakdown, ...]
    waited_for: tuple[tuple[int, float], ...]  # rank and ms, the longest first
    left_out: tuple[str, ...]  # sentences on what the trace does not tell

    @property
    def slowest_by_compute(self) -> int | None:
        """The rank with the longest compute time; None if fewer than two are known."""
        return _argmax({one.rank: one.compute for one in self.ranks})

    @property
    def slowest(self) -> int | None:
        """The rank with the longest step time without exposed communication."""
        return _argmax({one.rank: one.own for one in self.ranks})

    @property
    def waited_for_most(self) -> int | None:
        """The rank with the longest total wait of the other ranks for it."""
        return self.waited_for[0][0] if self.waited_for and self.waited_for[0][1] > 0 else None

    @property
    def holds_up(self) -> int | None:
        """The rank with the longest wait of other ranks for it, minus its own waiting time.

        In a chain of ranks that wait for each other, it is the rank at the end of the chain.
        """
        waits = {one.rank: sum(long for _, long in one.waited or ()) for one in self.ranks}
        most = max(self.waited_for, key=lambda pair: pair[1] - waits.get(pair[0], 0), default=None)
        return most[0] if most is not None and most[1] > 0 else None

    def others(self, rank: int, name: str) -> float:
        """Return the median of a breakdown attribute over all ranks except one."""
        values: list[float | None] = [getattr(o, name) for o in self.ranks if o.rank != rank]
        return statistics.median(value for value in values if value is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without unknown values."""
        named = {"version": 1, "unit": "milliseconds", **vars(self)}
        named["ranks"] = [_without_unknown(vars(one)) for one in self.ranks]
        for name in ("slowest", "slowest_by_compute", "waited_for_most", "holds_up"):
            named[name] = getattr(self, name)
        return _without_unknown(named)


def _without_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _argmax(values: Mapping[int, float | None]) -> int | None:
    known = {rank: value for rank, value in values.items() if value is not None}
    return max(known, key=lambda rank: known[rank]) if len(known) > 1 else None


def build_report(timeline: TimelineSpans, skip: int | None = None) -> TimelineReport:
    """Compute the report of all ranks, without the first ``skip`` (warm-up) steps of each."""
    spans = dict(sorted(timeline.ranks.items()))
    busy = {rank: one for rank, one in spans.items() if one.last >= one.first}
    if not busy:
        raise ArgumentError(
            "the timeline has no spans; nothing was computed or sent while it was recorded."
        )
    ranks = tuple(compute_breakdown(timeline, rank, skip) for rank in busy)
    left_out = tuple(_left_out(timeline, spans, ranks))
    return TimelineReport(timeline.size or len(spans), ranks, _waited_for(ranks), left_out)


def _waited_for(ranks: Iterable[RankBreakdown]) -> tuple[tuple[int, float], ...]:
    """Sum how long each rank delayed the others, longest first."""
    total: dict[int, float] = {}
    for one in ranks:
        for whom, long in one.waited or ():
            if whom >= 0:
                total[whom] = total.get(whom, 0.0) + long
    return tuple(sorted(total.items(), key=lambda pair: -pair[1]))


def _left_out(
    timeline: TimelineSpans, spans: Mapping[int, RankSpans], ranks: tuple[RankBreakdown, ...]
) -> list[str]:
    notes = []
    if timeline.missing:
        notes.append(f"Of {list_ranks(timeline.missing)} no file is there.")
    if idle := [rank for rank in spans if rank not in {one.rank for one in ranks}]:
        notes.append(f"Of {list_ranks(idle)} nothing is known: no span is in the file.")
    if stepless := [one.rank for one in ranks if one.steps is None]:
        notes.append(
            f"Step times of {list_ranks(stepless)} are not known, because no distributed optimizer "
            "stepped there: the figures are of all that was recorded."
        )
    if unseen := [one.rank for one in ranks if one.compute is None]:
        notes.append(
            f"Compute of {list_ranks(unseen)} is not known: no module was followed. Give the "
            "distributed optimizer the model: model=…."
        )
    if quiet := [one.rank for one in ranks if one.exposed is None]:
        notes.append(f"Of {list_ranks(quiet)} no communication is in the trace.")
    if unnamed := [one.rank for one in ranks if dict(one.waited or ()).get(-1)]:
        notes.append(
            f"Some of the time that {list_ranks(unnamed)} waited was for nobody who is known to "
            "have been late: messages were under way, or the processors busy."
        )
    called, moved = (
        {verb for one in spans.values() for verb in getattr(one, name)}
        for name in ("called", "moved")
    )
    if untraced := sorted(called - moved):
        notes.append(f"Bytes leave out {', '.join(untraced)}: how they travel is not in the trace.")
    return notes
