"""EquiDyn schedule: one random cyclic shift per round."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from ..checks import check_int
from ..errors import TopologyError
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["equi_dynamic"]


def _shifted(n: int, seed: int, eta: float, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: source u ahead, target u behind, for the round's shift u."""
    shift = int(np.random.default_rng((seed, k)).integers(1, n))
    share = eta * (n - 1) / n
    return Neighbors(1.0 - share, {(rank + shift) % n: share}, ((rank - shift) % n,))


def pair_up(n: int, shift: int, start: int) -> tuple[int, ...]:
    """Return the partner of every rank: from ``start`` on, i and i + shift if both are unpaired.

    A rank without a partner is its own partner.
    """
    partner = list(range(n))
    free = [True] * n
    for step in range(n):
        i = (start + step) % n
        j = (i + shift) % n
        if free[i] and free[j]:
            partner[i], partner[j] = j, i
            free[i] = free[j] = False
    return tuple(partner)


@lru_cache(maxsize=32)
def _round(n: int, seed: int, k: int) -> tuple[int, ...]:
    """Draw the pairs of one round; cached, since all ranks of a process use the same rounds."""
    rng = np.random.default_rng((seed, k))
    return pair_up(n, int(rng.integers(1, n)), int(rng.integers(n)))


def _paired(n: int, seed: int, eta: float, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: the round's partner, if there is one."""
    partner = _round(n, seed, k)[rank]
    if partner == rank:
        return Neighbors(1.0, {}, ())
    share = eta * (n - 1) / n
    return Neighbors(1.0 - share, {partner: share}, (partner,))


def equi_dynamic(n: int, seed: int, directed: bool = True, eta: float = 0.5) -> Schedule:
    r"""Build the EquiDyn schedule: one random shift, and one message per rank, in each round.

    .. math:: W^{(k)} = (1 - \eta) I + \eta A^{(u_k)}, \quad A^{(u)}_{ii} = \tfrac1n, \quad
              A^{(u)}_{i,\, i+u \bmod n} = \tfrac{n-1}{n}

    with :math:`u_k` uniform in 1..n-1. Undirected, ranks i and i + u pair up from a random start
    on, if both are unpaired. Mixing does not slow down with n: the mean squared distance to the
    average shrinks per round by :math:`(1-a)^2 + a^2 - 2a(1-a)/(n-1)`, :math:`a = \eta (n-1)/n`: by
    (n-1)/(2n) for :math:`\eta = 1/2`.

    Args:
        n: Number of ranks.
        seed: Seed of the shifts, the same on all ranks.
        directed: Whether a rank sends to another rank than it receives from.
        eta: Step size of the mixing in a round, in (0, 1].

    Returns:
        A schedule that never repeats; every round is doubly stochastic, symmetric if undirected.

    Raises:
        TopologyError: If an argument is out of range.

    Example:
        >>> equi_dynamic(8, seed=0).neighbors(rank=0, k=3)
        Neighbors(self_weight=0.5625, src_weights={4: 0.4375}, dst_ranks=(4,))

    Reference:
        Song et al., "Communication-efficient topologies for decentralized learning with O(1)
        consensus rate", NeurIPS 2022.
    """
    n = check_int(n, "n", "equi_dynamic", 1)
    seed = check_int(seed, "seed", "equi_dynamic", 0)
    if not 0 < eta <= 1:
        raise TopologyError(
            f"equi_dynamic needs eta in (0, 1], got eta={eta!r}; eta=0.5 mixes fastest on average"
        )
    style = ("" if directed else ", directed=False") + ("" if eta == 0.5 else f", eta={eta:g}")
    name = f"equi_dynamic({n}, seed={seed}{style})"
    if n == 1:
        return alone(name)
    return Schedule(name, n, None, partial(_shifted if directed else _paired, n, seed, eta))
