"""Attribution of waits in collectives to the rank that called last.

Each rank only records that it waited for all the others. With all ranks on one clock it shows who
called last: ranks call collectives in the same order, so that the k-th call of a name on one rank
is the k-th of that name on every other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOBODY = -1
"""Placeholder for a rank: no rank was late, or it is unknown which."""


def find_last_callers(
    mine: NDArray[np.float64], others: dict[int, NDArray[np.float64]], waits: NDArray[np.float64]
) -> list[int]:
    """Find the rank that each of a rank's waits in a collective was for.

    Args:
        mine: Times at which this rank called the verb, in order.
        others: Times at which the other ranks called it.
        waits: Shape ``(n, 2)``, begin and end of each wait.

    Returns:
        For each wait the rank that was last to call; ``NOBODY`` if all had called before the wait
        began, or if the call of one of them is in no file.

    Example:
        >>> mine, others = (
        ...     np.array([0.0, 10.0]),
        ...     {1: np.array([1.0, 11.0]), 2: np.array([5.0, 9.0])},
        ... )
        >>> find_last_callers(mine, others, np.array([[0.0, 6.0], [10.0, 12.0]]))
        [2, 1]
    """
    ranks = list(others)
    k = np.searchsorted(mine, waits[:, 1], side="right") - 1
    came = np.full((len(ranks), len(waits)), np.nan)
    for row, rank in enumerate(ranks):
        known = (k >= 0) & (k < len(others[rank]))
        came[row, known] = others[rank][k[known]]
    certain = ~np.isnan(came).any(axis=0)
    last = np.where(np.isnan(came), -np.inf, came).argmax(axis=0)
    late = certain & (came[last, np.arange(len(waits))] > waits[:, 0])
    return [ranks[row] if is_late else NOBODY for row, is_late in zip(last, late, strict=True)]
