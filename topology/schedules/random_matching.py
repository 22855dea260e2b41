"""Random matching schedule: ranks average in random pairs, drawn anew in every round."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from ..checks import check_int
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["random_matching"]


@lru_cache(maxsize=32)
def _partners(n: int, seed: int, k: int) -> tuple[int, ...]:
    """Draw every rank's partner in round k; cached, since all ranks of a process use it."""
    order = np.random.default_rng((seed, k)).permutation(n).tolist()
    partner = list(range(n))
    for i, j in zip(order[0::2], order[1::2], strict=False):
        partner[i], partner[j] = j, i
    return tuple(partner)


def _look_up(n: int, seed: int, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: the round's partner, if there is one."""
    partner = _partners(n, seed, k)[rank]
    if partner == rank:
        return Neighbors(1.0, {}, ())
    return Neighbors(0.5, {partner: 0.5}, (partner,))


def random_matching(n: int, seed: int = 0) -> Schedule:
    r"""Build the schedule of random pairs, drawn anew in every round; if n is odd, one rank idles.

    .. math:: W^{(k)}_{ii} = W^{(k)}_{i,\,p(i)} = 1/2

    with the pairs :math:`(i, p(i))` of a permutation drawn by seed and round, so that ranks agree
    without a message. The mean squared distance to the average is roughly halved per round.

    Args:
        n: Number of ranks.
        seed: Seed of the permutations, the same on all ranks.

    Returns:
        A schedule that never repeats; every round is symmetric and doubly stochastic.

    Raises:
        TopologyError: If an argument is out of range.

    Example:
        >>> sorted(random_matching(4).neighbors(rank, k=0).dst_ranks[0] for rank in range(4))
        [0, 1, 2, 3]

    Reference:
        Boyd, Ghosh, Prabhakar and Shah, "Randomized gossip algorithms", IEEE TIT 52(6), 2006.
    """
    n = check_int(n, "n", "random_matching", 1)
    seed = check_int(seed, "seed", "random_matching", 0)
    name = f"random_matching({n})" if seed == 0 else f"random_matching({n}, {seed})"
    if n == 1:
        return alone(name)
    return Schedule(name, n, None, partial(_look_up, n, seed))
