"""Shift-one schedule: ranks of the lower half pair up with ranks of the upper half."""

from __future__ import annotations

from functools import partial

from ..checks import check_int
from ..errors import TopologyError
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["shift_one"]


def _look_up(half: int, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: the rank of the other half shifted by k."""
    peer = half + (rank + k) % half if rank < half else (rank - half - k) % half
    return Neighbors(0.5, {peer: 0.5}, (peer,))


def shift_one(n: int) -> Schedule:
    r"""Build the shift-one schedule: ranks of both halves pair up, shifted by one in each round.

    .. math:: W^{(k)}_{ii} = W^{(k)}_{i,\,p} = 1/2, \quad
        p = h + (i + k) \bmod h \text{ for } i < h, \quad
        p = (i - h - k) \bmod h \text{ for } i \ge h, \quad h = n/2

    Ranks of the same half never pair up. The average is exact for n up to 4, and otherwise
    approached; it becomes exact with :func:`.topology.one_peer_hypercube` and
    :func:`.topology.base_k` with k = 1.

    Args:
        n: Number of ranks, even, or 1.

    Returns:
        A schedule of period n / 2; every round is symmetric and doubly stochastic.

    Raises:
        TopologyError: If n is odd.

    Example:
        >>> [shift_one(6).neighbors(rank, k=1).dst_ranks[0] for rank in range(6)]
        [4, 5, 3, 2, 0, 1]

    Reference:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2022,
        whose decentralized algorithm has it as ``peer_selection_mode="shift_one"``.
    """
    n = check_int(n, "n", "shift_one", 1)
    name = f"shift_one({n})"
    if n == 1:
        return alone(name)
    if n % 2:
        raise TopologyError(
            f"shift_one needs an even n, since each rank has a partner in every round, got n={n}; "
            f"nearest: {n - 1}, {n + 1}, or use one_peer_exponential({n}) or base_k({n}, 1), which "
            "serve every n"
        )
    return Schedule(name, n, n // 2, partial(_look_up, n // 2))
