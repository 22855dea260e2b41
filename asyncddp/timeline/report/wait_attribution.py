"""Attribution of waits in collectives to the rank that called last.

Each rank only records that it waited for all the others. With all ranks on one clock it shows who
called last: ranks call collectives in the same order, so that the k-th call of a name on one rank
is the k-th of that name on every other.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NOBODY = -1
"""Placeholder for a rank: no rank was late, or it is unknown which."""


class VerbCalls:
    """Times at which a rank called each communication operation, in µs on rank 0's clock."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))

    def add(self, verb: str, name: str, begin: float) -> None:
        """Add the begin of a call."""
        self._times[verb, name].append(begin)

    def times(self, verb: str, name: str) -> NDArray[np.float64]:
        """Return the begin times of the calls of one verb and name, in order."""
        return np.sort(np.array(self._times.get((verb, name), ()), dtype=np.float64))


class PeerWaits:
    """Waits of one rank, grouped by the peer, or the set of peers, that it waited for."""

    def __init__(self) -> None:
        self.single: dict[int, array[float]] = defaultdict(lambda: array("d"))
        self.joint: dict[tuple[str, str, tuple[int, ...]], array[float]] = defaultdict(
            lambda: array("d")
        )

    def add(self, verb: str, name: str, peers: Sequence[int], begin: float, end: float) -> None:
        """Add a wait and the ranks that it was for."""
        if len(peers) > 1:
            self.joint[verb, name, tuple(peers)].extend((begin, end))
        else:
            self.single[peers[0] if peers else NOBODY].extend((begin, end))


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
