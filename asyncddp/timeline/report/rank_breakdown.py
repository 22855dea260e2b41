r"""Breakdown of one rank's step time into compute, exposed communication, and other.

With :math:`B` the times in which the caller is blocked by communication, :math:`C` those of
forward, backward and optimizer in which it is not, and :math:`T` those in which messages travel or
are mixed by another thread, a step of length :math:`s` is

.. math:: s = |C| + |B| + \text{other}, \qquad \text{hidden} = |T \cap C|.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from asyncddp.errors import ArgumentError
from asyncddp.timeline.report.intervals import Intervals, intersection, length_within, union
from asyncddp.timeline.report.trace_spans import BLOCKING, COMPUTE, RankSpans, TimelineSpans

_BACKGROUND = ("collective", "mixing", "transfer")


@dataclass(frozen=True)
class RankBreakdown:
    """Average time per step of one rank, split into compute, exposed communication and other.

    Where no steps were recorded, the figures are of the whole recording. Times are milliseconds;
    what the trace does not tell is None.
    """

    rank: int
    steps: int | None  # averaged; None where none were recorded
    recorded: float  # from the first span's begin to the last one's end
    step: float | None  # mean length: the sum of compute, exposed and other
    step_median: float | None
    step_low: float | None  # 10th percentile
    step_high: float | None  # 90th percentile
    compute: float | None  # in forward, backward and optimizer, without what is exposed
    exposed: float | None  # communication blocked the caller, also within a hook in them
    other: float | None  # data, the script's own lines, other programs on the machine
    hidden: float | None  # messages travelled, or another thread mixed, during compute
    waited: tuple[tuple[int, float], ...] | None  # ranks, the longest first; -1 where unknown
    sent: float | None  # bytes
    received: float | None

    @property
    def own(self) -> float | None:
        """Time per step without exposed communication."""
        return None if self.step is None else self.step - (self.exposed or 0.0)


class _StepIntervals:
    """Begin and end in µs of each step of a rank; without steps, of the whole recording."""

    def __init__(self, spans: RankSpans, rank: int, skip: int | None) -> None:
        steps = spans.sorted_steps()
        self.stepped = len(steps) > 0
        self.rows = np.array([[spans.first, spans.last]])
        if self.stepped:
            skip = int(len(steps) > 1) if skip is None else skip
            if skip >= len(steps):
                raise ArgumentError(
                    f"--skip {skip} leaves nothing of the {len(steps)} steps of rank {rank}; skip "
                    "fewer."
                )
            self.rows = steps[skip:]

    def time(self, intervals: Intervals) -> float:
        """Return the mean length of a set of intervals per step, in ms."""
        return float(length_within(intervals, self.rows).mean()) / 1e3

    def bytes(self, flat: array[float]) -> float:
        """Return the mean number of message bytes per step."""
        times, counts = np.reshape(flat, (-1, 2)).T
        inside = (times >= self.rows[:, 0].min()) & (times < self.rows[:, 1].max())
        return float(counts[inside].sum()) / len(self.rows)


def compute_breakdown(timeline: TimelineSpans, rank: int, skip: int | None = None) -> RankBreakdown:
    """Compute a rank's time breakdown without ``skip`` warm-up steps (None: 0 or 1)."""
    spans = timeline.ranks[rank]
    windows = _StepIntervals(spans, rank, skip)
    step = median = low = high = None
    if windows.stepped:
        lengths = (windows.rows[:, 1] - windows.rows[:, 0]) / 1e3
        step = float(lengths.mean())
        low, median, high = np.quantile(lengths, [0.1, 0.5, 0.9]).tolist()
    busy, blocked = spans.intervals(*COMPUTE), spans.intervals(*BLOCKING)
    background = spans.intervals(*_BACKGROUND)

    def unblocked(intervals: Intervals) -> float:  # time while the caller was not blocked
        return windows.time(intervals) - windows.time(intersection(intervals, blocked))

    compute = unblocked(busy) if len(busy) else None
    exposed = windows.time(blocked) if len(blocked) or len(background) else None
    known = len(busy) and len(background)
    moved = bool(spans.sent or spans.received)
    waits = {whom: windows.time(union(rows)) for whom, rows in timeline.waits_of(rank).items()}
    return RankBreakdown(
        rank,
        steps=len(windows.rows) if windows.stepped else None,
        recorded=(spans.last - spans.first) / 1e3,
        step=step,
        step_median=median,
        step_low=low,
        step_high=high,
        compute=compute,
        exposed=exposed,
        other=None if step is None or compute is None else step - compute - (exposed or 0.0),
        hidden=unblocked(intersection(background, busy)) if known else None,
        waited=tuple(sorted(waits.items(), key=lambda pair: -pair[1])) if waits else None,
        sent=windows.bytes(spans.sent) if moved else None,
        received=windows.bytes(spans.received) if moved else None,
    )
