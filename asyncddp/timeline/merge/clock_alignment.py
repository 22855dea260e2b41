"""Alignment of the ranks' clocks: conversion of all time stamps to rank 0's clock.

Each rank has measured now and then how far rank 0's clock is ahead of its own. Between two
measurements the offset is interpolated, so that a constant drift causes no error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from asyncddp.timeline.trace_files import RankTraceInfo

_WORST_DRIFT = 1e-4  # of two quartz clocks, where there is one measurement only


class ClockAlignment:
    """Conversion of a rank's time stamps to rank 0's clock, by a piecewise linear offset.

    ``points`` are ``(ts, offset, error)`` in µs, sorted. ``drifts`` is False where the rank shares
    the clock of rank 0's machine, ``measured`` where the points are only a guess.
    """

    def __init__(
        self,
        points: Sequence[tuple[float, float, float]],
        *,
        drifts: bool = True,
        measured: bool = True,
    ) -> None:
        self._times = [ts for ts, _, _ in points]
        self._offsets = [offset for _, offset, _ in points]
        self._errors = [error for _, _, error in points]
        self._drifts, self.measured = drifts, measured

    def __call__(self, ts: float) -> float:
        """Convert a time of the rank to rank 0's clock."""
        times, offsets = self._times, self._offsets
        k = bisect_right(times, ts)
        if k in (0, len(times)):
            return ts + offsets[min(k, len(times) - 1)]
        share = (ts - times[k - 1]) / (times[k] - times[k - 1])
        return ts + offsets[k - 1] + share * (offsets[k] - offsets[k - 1])

    def drift(self) -> float:
        """Estimate the relative drift of the two clocks: 1e-6 is one µs per second."""
        if not self._drifts:
            return 0.0
        if self._times[-1] == self._times[0]:
            return _WORST_DRIFT
        return abs(self._offsets[-1] - self._offsets[0]) / (self._times[-1] - self._times[0])

    @property
    def drifting(self) -> bool:
        """True if the drift exceeds the errors of measurement."""
        moved = abs(self._offsets[-1] - self._offsets[0])
        return self.measured and moved > self._errors[-1] + self._errors[0]

    def error(self, first: float, last: float) -> float | None:
        """Bound the error in µs between two times, with drift outside the measurements, if any."""
        if not self.measured:
            return None
        outside = max(self._times[0] - first, last - self._times[-1], 0.0)
        return max(self._errors) + self.drift() * outside


def align_clocks(files: Sequence[RankTraceInfo]) -> dict[int, ClockAlignment]:
    """Determine the clock alignment of every rank.

    Ranks on one machine share a clock, which is exact where their measurements agree with that. A
    rank of another machine without measurements is aligned by wall clocks, whose error is unknown.
    """
    base = min(files, key=lambda file: file.rank)
    own: dict[str, Sequence[tuple[float, float, float]]] = {base.host: [(0.0, 0.0, 0.0)]}
    own.update({file.host: file.clocks for file in files if file.clocks})

    def clock_of(file: RankTraceInfo) -> ClockAlignment:
        points = file.clocks or own.get(file.host)
        here = file.host == base.host and not base.rank
        if here and all(abs(offset) <= error for _, offset, error in file.clocks):
            points = [(file.start, 0.0, 0.0)]
        if points:
            return ClockAlignment(points, drifts=file.host != base.host)
        ahead = 1e6 * (file.started - base.started) - (file.first - base.first)
        offset = ClockAlignment(own[base.host])(base.first) - base.first + ahead
        return ClockAlignment([(file.first, offset, 0.0)], measured=False)

    return {file.rank: clock_of(file) for file in files}
