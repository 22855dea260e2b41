r"""One clock for all ranks: rank 0's.

Each rank has measured now and then how far rank 0's clock is ahead of its own, to within half a
round trip. Between two measurements the offset is interpolated, so that a drift that is constant
in between costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from asyncddp.timeline.reading import RankFile

__all__ = ["Clock", "clocks_of"]

_WORST_DRIFT = 1e-4  # of two quartzes, if nobody measured twice


class Clock:
    r"""Rank 0's time from a rank's own, :math:`t_0 = t + o(t)`, with :math:`o` piecewise linear.

    Args:
        points: ``(ts, offset, error)`` in µs, sorted by time, at least one; before the first and
            after the last the offset is held.
        drifts: Whether the rank has a clock of its own; on rank 0's machine it has not.
        measured: Whether the points are more than a guess.

    Example:
        >>> clock = Clock([(0.0, 100.0, 2.0), (1000.0, 110.0, 3.0)])
        >>> clock(500.0), clock.error(0.0, 1000.0)
        (605.0, 3.0)
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
        self._drifts = drifts
        self.measured = measured

    def __call__(self, ts: float) -> float:
        """Rank 0's time, at a time of the rank's own."""
        times, offsets = self._times, self._offsets
        k = bisect_right(times, ts)
        if k == 0:
            return ts + offsets[0]
        if k == len(times):
            return ts + offsets[-1]
        share = (ts - times[k - 1]) / (times[k] - times[k - 1])
        return ts + offsets[k - 1] + share * (offsets[k] - offsets[k - 1])

    def drift(self) -> float:
        """How much the clocks move apart, as a fraction: 1e-6 is one µs per second."""
        if not self._drifts:
            return 0.0
        if self._times[-1] == self._times[0]:
            return _WORST_DRIFT
        return abs(self._offsets[-1] - self._offsets[0]) / (self._times[-1] - self._times[0])

    @property
    def drifting(self) -> bool:
        """Whether its drift is more than errors of measurement."""
        moved = abs(self._offsets[-1] - self._offsets[0])
        return self.measured and moved > self._errors[-1] + self._errors[0]

    def error(self, first: float, last: float) -> float | None:
        """The largest error in µs between two times, with drift outside the measurements.

        None where nothing was measured.
        """
        if not self.measured:
            return None
        outside = max(self._times[0] - first, last - self._times[-1], 0.0)
        return max(self._errors) + self.drift() * outside


def clocks_of(files: Sequence[RankFile]) -> dict[int, Clock]:
    """A clock per rank.

    Ranks on one machine share a clock; where measurements agree with that, it is better than they
    are. A rank of another machine on which nobody has measured is placed by the machines' wall
    clocks, whose error nobody knows.
    """
    base = min(files, key=lambda file: file.rank)
    own: dict[str, Sequence[tuple[float, float, float]]] = {base.host: [(0.0, 0.0, 0.0)]}
    own.update({file.host: file.clocks for file in files if file.clocks})

    def clock_of(file: RankFile) -> Clock:
        """What was measured for it or on its machine; the time of day otherwise."""
        points = file.clocks or own.get(file.host)
        here = file.host == base.host and not base.rank
        if here and all(abs(offset) <= error for _, offset, error in file.clocks):
            points = [(file.start, 0.0, 0.0)]
        if points:
            return Clock(points, drifts=file.host != base.host)
        ahead = 1e6 * (file.started - base.started) - (file.first - base.first)
        offset = Clock(own[base.host])(base.first) - base.first + ahead
        return Clock([(file.first, offset, 0.0)], measured=False)

    return {file.rank: clock_of(file) for file in files}
