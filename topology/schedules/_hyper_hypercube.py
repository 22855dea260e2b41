"""K-peer hyper-hypercube, the building block of the base-(k+1) schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..neighbors import Neighbors, average_over

__all__ = ["HyperHypercube", "factors_of"]


def factors_of(n: int, peers: int) -> tuple[int, ...]:
    """Factor n into factors of at most ``peers`` + 1, ascending; empty if that is impossible.

    The largest factor is divided out first, so that there are few: 8 is (2, 4) for three peers.
    """
    factors = []
    for factor in range(min(peers + 1, n), 1, -1):
        while n % factor == 0:
            factors.append(factor)
            n //= factor
    return tuple(reversed(factors)) if n == 1 else ()


@dataclass(frozen=True, slots=True)
class HyperHypercube:
    """Hyper-hypercube: in round m, ranks average whose mixed-radix digits differ in digit m only.

    Attributes:
        factors: Number of values of each digit, the lowest digit first.
    """

    factors: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of rounds until all ranks hold the average."""
        return len(self.factors)

    def neighbors(self, rank: int, m: int) -> Neighbors:
        """Return the neighbours of one rank in round m, taken modulo the length."""
        if not self.factors:
            return average_over(rank, (rank,))
        m %= self.length
        stride, factor = math.prod(self.factors[:m]), self.factors[m]
        first = rank - rank // stride % factor * stride
        return average_over(rank, range(first, first + factor * stride, stride))
