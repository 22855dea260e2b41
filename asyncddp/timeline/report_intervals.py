"""Sets of moments, as disjoint intervals: how long a span of a kind lasted, or of two at once.

A set is an array of shape ``(k, 2)``, sorted, with ``[begin, end)`` in each row.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Intervals", "common", "length_within", "union"]

Intervals: TypeAlias = NDArray[np.float64]


def union(*spans: ArrayLike) -> Intervals:
    """The moments in at least one span, whichever way they overlap or nest.

    Args:
        spans: Arrays of shape ``(k, 2)``, in any order; spans of no length add nothing.

    Example:
        >>> union([(4, 6), (0, 2), (1, 3)], [(6, 7)]).tolist()
        [[0.0, 3.0], [4.0, 7.0]]
    """
    rows = np.concatenate([np.asarray(one, np.float64).reshape(-1, 2) for one in spans])
    rows = rows[rows[:, 1] > rows[:, 0]]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    reach = np.maximum.accumulate(rows[:, 1])
    fresh = np.flatnonzero(np.r_[True, rows[1:, 0] > reach[:-1]])
    last = np.r_[fresh[1:] - 1, len(rows) - 1]
    return np.stack([rows[fresh, 0], reach[last]], axis=1)


def _length_until(moments: Intervals, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """How long the set lasted before each time."""
    if not len(moments):
        return np.zeros(len(times))
    behind = np.r_[0.0, np.cumsum(moments[:, 1] - moments[:, 0])]
    k = np.searchsorted(moments[:, 0], times, side="right")
    beyond = np.where(k > 0, moments[k - 1, 1] - times, 0.0)
    before: NDArray[np.float64] = behind[k] - np.clip(beyond, 0.0, None)
    return before


def length_within(moments: Intervals, windows: ArrayLike) -> NDArray[np.float64]:
    """How long a set lasts within each window.

    Args:
        moments: What :func:`union` gave.
        windows: Shape ``(n, 2)``, in any order; they may overlap.

    Returns:
        Shape ``(n,)``.

    Example:
        >>> length_within(union([(0, 3), (4, 7)]), [(2, 5), (7, 9)]).tolist()
        [2.0, 0.0]
    """
    rows = np.asarray(windows, np.float64).reshape(-1, 2)
    return _length_until(moments, rows[:, 1]) - _length_until(moments, rows[:, 0])


def common(one: Intervals, other: Intervals) -> Intervals:
    """The moments that are in both sets.

    Example:
        >>> common(union([(0, 3), (4, 7)]), union([(2, 5)])).tolist()
        [[2.0, 3.0], [4.0, 5.0]]
    """
    if not len(one) or not len(other):
        return np.empty((0, 2))
    edges = np.unique(np.r_[one.ravel(), other.ravel()])
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    middle = pieces.mean(axis=1)
    return union(pieces[_holds(one, middle) & _holds(other, middle)])


def _holds(moments: Intervals, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    k = np.searchsorted(moments[:, 0], times, side="right")
    inside: NDArray[np.bool_] = (k > 0) & (times < moments[k - 1, 1])
    return inside
