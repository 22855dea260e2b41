"""Inner-outer schedules: one rank per machine sends to another machine, the others inside."""

from __future__ import annotations

import math
from functools import partial

from ..checks import check_int
from ..errors import TopologyError
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["inner_outer_exponential", "inner_outer_ring"]

Powers = tuple[int, int]  # periods of the outer and of the inner distance: 1, 2, 4, … and again


def _skip(distance: int, gap: int) -> int:
    """Adjust a distance around the local circle, omitting the rank that is ``gap`` ahead."""
    return distance if distance < gap else distance + 1


def _look_up(n: int, size: int, powers: Powers, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: on another machine for local rank k mod L, else on its own."""
    machine, local = divmod(rank, size)
    outgoing = k % size
    if local == outgoing:
        far = 2 ** (k % powers[0]) * size
        source, target = (rank - far) % n, (rank + far) % n
    else:
        near = 2 ** (k % powers[1])
        ahead = _skip(near, (outgoing - local) % size)
        behind = _skip(near, (local - outgoing) % size)
        source = machine * size + (local - behind) % size
        target = machine * size + (local + ahead) % size
    if source == rank:
        return Neighbors(1.0, {}, ())
    return Neighbors(0.5, {source: 0.5}, (target,))


def _build(family: str, n: int, local_size: int, powers: Powers) -> Schedule:
    """Build a schedule of either family; they differ in their distances only."""
    period = math.lcm(local_size, *powers)
    look_up = partial(_look_up, n, local_size, powers)
    return Schedule(f"{family}({n}, {local_size})", n, period, look_up)


def _check(family: str, n: int, local_size: int) -> tuple[int, int]:
    """Check and return n and the number of ranks per machine."""
    n = check_int(n, "n", family, 1)
    local_size = check_int(local_size, "local_size", family, 1)
    if n > 1 and (local_size < 3 or n % local_size):
        fitting = [size for size in range(3, n + 1) if n % size == 0]
        near = min(fitting, key=lambda size: abs(size - local_size), default=None)
        hint = f"nearest: local_size={near}, or use" if near else "use"
        raise TopologyError(
            f"{family} needs a local_size >= 3 that divides n, got n={n}, "
            f"local_size={local_size}; {hint} one_peer_exponential({n})"
        )
    return n, local_size


def inner_outer_ring(n: int, local_size: int) -> Schedule:
    r"""Build the inner-outer ring: local rank k mod L sends to the next machine, all others inside.

    .. math:: W^{(k)} = \tfrac12 (I + P^{(k)}), \quad P^{(k)} \text{ a permutation}

    Rank r is local rank r mod L on machine r div L. One rank per machine uses the network in each
    round k, and the other ranks exchange around a ring on their own machine. On a single machine,
    local rank k mod L keeps its value.

    Args:
        n: Number of ranks.
        local_size: Ranks per machine, L, at least 3 and a divisor of n.

    Returns:
        A schedule of period L; every round is doubly stochastic.

    Raises:
        TopologyError: If the arguments do not fit.

    Example:
        >>> [inner_outer_ring(8, 4).neighbors(rank, k=0).dst_ranks[0] for rank in range(4)]
        [4, 2, 3, 1]

    Reference:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021.
    """
    n, local_size = _check("inner_outer_ring", n, local_size)
    if n == 1:
        return alone(f"inner_outer_ring(1, {local_size})")
    return _build("inner_outer_ring", n, local_size, (1, 1))


def inner_outer_exponential(n: int, local_size: int) -> Schedule:
    r"""Build the inner-outer exponential schedule, with distances 1, 2, 4, … in place of 1.

    .. math:: d_\text{out} = 2^{k \bmod (\lfloor \log_2 (M-1) \rfloor + 1)}, \quad
              d_\text{in} = 2^{k \bmod (\lfloor \log_2 (L-2) \rfloor + 1)}

    with M machines of L ranks; otherwise as :func:`.topology.inner_outer_ring`. Where L and the
    period of the outer distance have a common divisor, a local rank never uses some distances,
    and the average is reached more slowly. (:func:`.topology.alternating_exponential_ring` reaches
    it exactly.)

    Args:
        n: Number of ranks.
        local_size: Ranks per machine, L, at least 3 and a divisor of n.

    Returns:
        A periodic schedule; every round is doubly stochastic.

    Raises:
        TopologyError: If the arguments do not fit.

    Example:
        >>> [inner_outer_exponential(8, 4).neighbors(r, k=1).dst_ranks[0] for r in range(4)]
        [3, 5, 0, 2]

    Reference:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021.
    """
    n, local_size = _check("inner_outer_exponential", n, local_size)
    if n == 1:
        return alone(f"inner_outer_exponential(1, {local_size})")
    machines = n // local_size
    powers = (max(1, (machines - 1).bit_length()), (local_size - 2).bit_length())
    return _build("inner_outer_exponential", n, local_size, powers)
