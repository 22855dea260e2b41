"""Successive halving: selects the next candidate to measure, and finally the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def trials_of(candidates: int) -> int:
    """Return the number of trials in a search among so many candidates.

    Example:
        >>> [trials_of(n) for n in (1, 2, 3, 6)]
        [0, 2, 5, 11]
    """
    return 0 if candidates < 2 else candidates + trials_of(-(-candidates // 2))


class SuccessiveHalving:
    r"""Search for the fastest candidate: measures all, then the faster half, and so on.

    With :math:`S_0` all candidates and :math:`t_c` the mean of what was measured of c,

    .. math:: S_{k+1} = \text{the } \lceil |S_k| / 2 \rceil \text{ of } S_k
              \text{ with the smallest } t_c

    until one is left. Each k measures its candidates twice, in an order and in its reverse. So what
    a steady drift adds is the same for all, and so is the factor of a machine that is slower from
    one sweep to the next.

    Args:
        candidates: Their number, at least 1.

    Attributes:
        seconds: What was measured of each candidate so far.

    Example:
        >>> search = SuccessiveHalving(3)
        >>> while search.current is not None:
        ...     search.record([0.3, 0.1, 0.2][search.current])
        >>> search.best, search.seconds
        (1, [[0.3, 0.3], [0.1, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2]])

    References:
        Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter
        optimization", AISTATS 2016.
    """

    def __init__(self, candidates: int) -> None:
        self.seconds: list[list[float]] = [[] for _ in range(candidates)]
        self._left = list(range(candidates))
        self._queue = self._order()

    def _order(self) -> list[int]:
        return [*self._left, *reversed(self._left)] if len(self._left) > 1 else []

    @property
    def current(self) -> int | None:
        """The candidate to measure now; None when the search is over."""
        return self._queue[0] if self._queue else None

    @property
    def best(self) -> int:
        """The fastest candidate, once the search is over."""
        return self._left[0]

    @property
    def measurements(self) -> int:
        """Number of measurements made so far; each trial has two."""
        return sum(map(len, self.seconds))

    def record(self, seconds: float) -> None:
        """Record a measurement of the current candidate, and advance to the next."""
        self.seconds[self._queue.pop(0)].append(seconds)
        if not self._queue:
            ranked = sorted(self._left, key=self._mean)
            self._left = sorted(ranked[: -(-len(ranked) // 2)])
            self._queue = self._order()

    def _mean(self, candidate: int) -> float:
        return fmean(self.seconds[candidate])

    def replay(self, seconds: Sequence[Sequence[float]]) -> None:
        """Record again the ``seconds`` that a search of as many candidates has measured."""
        left = [list(one) for one in seconds]
        while self.current is not None and left[self.current]:
            self.record(left[self.current].pop(0))
