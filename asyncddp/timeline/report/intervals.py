"""Sets of disjoint time intervals: union, intersection, and length within given time ranges.

A set is an array of shape ``(k, 2)``, sorted, with ``[begin, end)`` in each row.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Intervals: TypeAlias = NDArray[np.float64]


def union(*spans: ArrayLike) -> Intervals:
    """Merge spans, given as rows that may overlap or nest, into disjoint intervals."""
    rows = np.concatenate([np.asarray(one, np.float64).reshape(-1, 2) for one in spans])
    rows = rows[rows[:, 1] > rows[:, 0]]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    reach = np.maximum.accumulate(rows[:, 1])
    fresh = np.flatnonzero(np.r_[True, rows[1:, 0] > reach[:-1]])
    last = np.r_[fresh[1:] - 1, len(rows) - 1]
    return np.stack([rows[fresh, 0], reach[last]], axis=1)


def _length_until(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.float64]:
    if not len(intervals):
        return np.zeros(len(times))
    lengths = np.cumsum(intervals[:, 1] - intervals[:, 0])
    at_edges = np.repeat(np.r_[0.0, lengths], 2)[1:-1]
    before: NDArray[np.float64] = np.interp(times, intervals.ravel(), at_edges)
    return before


def length_within(intervals: Intervals, windows: ArrayLike) -> NDArray[np.float64]:
    """Compute the total length of the intervals inside each window; windows may overlap."""
    rows = np.asarray(windows, np.float64).reshape(-1, 2)
    return _length_until(intervals, rows[:, 1]) - _length_until(intervals, rows[:, 0])


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Intersect two sets of intervals."""
    if not len(one) or not len(other):
        return np.empty((0, 2))
    edges = np.unique(np.r_[one.ravel(), other.ravel()])
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    return union(pieces[(length_within(one, pieces) > 0) & (length_within(other, pieces) > 0)])
