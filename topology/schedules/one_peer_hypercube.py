"""One-peer hypercube schedule: ranks that differ in bit k exchange in round k."""

from __future__ import annotations

from ..checks import check_int, check_power_of_two
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["one_peer_hypercube"]


def _look_up(rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: the rank whose number differs in bit k."""
    peer = rank ^ (1 << k)
    return Neighbors(0.5, {peer: 0.5}, (peer,))


def one_peer_hypercube(n: int) -> Schedule:
    r"""Build the one-peer hypercube: ranks that differ in bit k exchange in round k.

    .. math:: W^{(k)}_{ii} = W^{(k)}_{i,\, i \oplus 2^{k \bmod t}} = 1/2, \quad t = \log_2 n

    The average is exact after log2(n) rounds. Unlike :func:`.topology.one_peer_exponential`, every
    round is symmetric.

    Args:
        n: Number of ranks, a power of two.

    Returns:
        A schedule of period t; every round is symmetric and doubly stochastic.

    Raises:
        TopologyError: If n is no power of two.

    Example:
        >>> one_peer_hypercube(8).neighbors(rank=5, k=1)
        Neighbors(self_weight=0.5, src_weights={7: 0.5}, dst_ranks=(7,))
    """
    n = check_int(n, "n", "one_peer_hypercube", 1)
    instead = f"base_k({n}, 1), which is exact for every n"
    bits = check_power_of_two(n, "n", "one_peer_hypercube", instead)
    name = f"one_peer_hypercube({n})"
    return Schedule(name, n, bits, _look_up) if n > 1 else alone(name)
