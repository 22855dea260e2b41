"""One-peer exponential schedule: rank i sends to rank i + 2^k in round k."""

from __future__ import annotations

from functools import partial

from ..checks import check_int
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["one_peer_exponential"]


def _look_up(n: int, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: target 2^k ahead, source 2^k behind."""
    distance = 2**k
    return Neighbors(0.5, {(rank - distance) % n: 0.5}, ((rank + distance) % n,))


def one_peer_exponential(n: int) -> Schedule:
    r"""Build the one-peer exponential schedule: rank i sends to i + 2^k in round k.

    .. math:: W^{(k)} = \tfrac12 (I + P^{2^{k \bmod t}}), \quad t = \lceil \log_2 n \rceil

    with P the cyclic shift. Where n is a power of two, the product of any t rounds in a row is
    the exact average J; for other n the average is only approached (:func:`.topology.base_k` is
    exact for every n).

    Args:
        n: Number of ranks.

    Returns:
        A schedule of period t; every round is doubly stochastic.

    Raises:
        TopologyError: If ``n < 1``.

    Example:
        >>> one_peer_exponential(8).neighbors(rank=0, k=2)
        Neighbors(self_weight=0.5, src_weights={4: 0.5}, dst_ranks=(4,))

    Reference:
        Ying et al., "Exponential graph is provably efficient for decentralized deep training",
        NeurIPS 2021.
    """
    n = check_int(n, "n", "one_peer_exponential", 1)
    name = f"one_peer_exponential({n})"
    if n == 1:
        return alone(name)
    return Schedule(name, n, (n - 1).bit_length(), partial(_look_up, n))
