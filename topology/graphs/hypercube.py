"""Hypercube: ranks whose numbers differ in one bit exchange."""

from __future__ import annotations

import networkx as nx

from ..checks import check_int, check_power_of_two
from ..weights import undirected

__all__ = ["hypercube"]


def hypercube(n: int) -> nx.DiGraph[int]:
    r"""Build the hypercube: ranks whose numbers differ in exactly one bit exchange.

    .. math:: w_{ii} = w_{i,\, i \oplus 2^m} = 1/(t+1), \quad t = \log_2 n, \quad
              \|W - J\|_2 = (t-1)/(t+1)

    Args:
        n: Number of ranks, a power of two.

    Returns:
        A symmetric doubly stochastic graph with self-loops.

    Raises:
        TopologyError: If n is no power of two.

    Example:
        >>> sorted(hypercube(8).successors(5))
        [1, 4, 5, 7]
    """
    n = check_int(n, "n", "hypercube", 1)
    instead = f"base_k({n}, 1), which is exact for every n"
    bits = check_power_of_two(n, "n", "hypercube", instead)
    edges = ((i, i ^ (1 << bit)) for i in range(n) for bit in range(bits))
    return undirected(f"hypercube({n})", n, edges)
