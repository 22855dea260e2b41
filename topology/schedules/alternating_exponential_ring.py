"""Alternating exponential ring: machines average in pairs, or inside, in alternate rounds."""

from __future__ import annotations

from functools import partial

from ..checks import check_int, check_power_of_two
from ..errors import TopologyError
from ..neighbors import Neighbors, average_over
from ..schedule import Schedule, alone

__all__ = ["alternating_exponential_ring"]


def _look_up(machines: int, size: int, rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: all ranks of two machines, or of its own, by the pair's turn."""
    machine = rank // size
    stage, half = divmod(k, 2)
    step = 1 << stage
    if machines == 1:
        return average_over(rank, range(size))
    low = machine & ~step
    pair = (low >> (stage + 1) << stage) | (low & (step - 1))  # low without bit number `stage`
    first = (stage * (machines // 2) + pair) % 2  # in which half the pair uses the network: 1 - it
    if half == first:
        return average_over(rank, range(machine * size, (machine + 1) * size))
    both = (low, low + step)
    return average_over(rank, [m * size + local for m in both for local in range(size)])


def alternating_exponential_ring(n: int, local_size: int) -> Schedule:
    r"""Build the schedule in which machines average in pairs, half of the pairs at a time.

    .. math:: W^{(k)}_{ij} = 1 / |C^{(k)}(i)| \text{ for } j \in C^{(k)}(i)

    In stage s = 0, 1, …, log2(M) - 1, machines that differ in bit s form pairs. A stage has two
    rounds: one half of the pairs averages over the 2L ranks of both machines, while the other half
    averages inside each machine; then the halves change roles. The average is exact after
    2 log2(M) rounds (after one round on one machine).

    Args:
        n: Number of ranks.
        local_size: Ranks per machine, L; the number of machines M = n / L must be a power of two.

    Returns:
        A periodic schedule; every round is symmetric and doubly stochastic.

    Raises:
        TopologyError: If the arguments do not fit.

    Example:
        >>> schedule = alternating_exponential_ring(8, local_size=2)
        >>> [schedule.neighbors(rank=0, k=k).dst_ranks for k in range(4)]
        [(1,), (1, 2, 3), (1,), (1, 4, 5)]

    Reference:
        Wang et al., "From promise to practice: realizing high-performance decentralized
        training", ICLR 2025.
    """
    family = "alternating_exponential_ring"
    n = check_int(n, "n", family, 1)
    local_size = check_int(local_size, "local_size", family, 1)
    name = f"{family}({n}, {local_size})"
    if n == 1:
        return alone(name)
    if n % local_size:
        near = min((s for s in range(1, n + 1) if n % s == 0), key=lambda s: abs(s - local_size))
        raise TopologyError(
            f"{family} needs a local_size that divides n, got n={n}, local_size={local_size}; "
            f"nearest: local_size={near}"
        )
    machines = n // local_size
    instead = f"base_k({machines}, 1) between machines, which is exact for every number"
    stages = check_power_of_two(machines, "n / local_size", family, instead)
    return Schedule(name, n, max(1, 2 * stages), partial(_look_up, machines, local_size))
