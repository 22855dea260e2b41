"""Exponential graphs: on a circle, ranks have neighbours at distances 1, b, b², … from them."""

from __future__ import annotations

from collections.abc import Collection

import networkx as nx

from ..checks import check_int
from ..weights import circulant

__all__ = ["exponential", "exponential_two", "symmetric_exponential"]


def _uniform(name: str, n: int, distances: Collection[int]) -> nx.DiGraph[int]:
    """Build the graph in which i sends to i + d for every distance d, with equal weights."""
    return circulant(name, n, dict.fromkeys(distances, 1.0 / (len(distances) + 1)))


def _powers(base: int, below: int) -> list[int]:
    """Return the powers 1, base, base², … below a bound."""
    powers = []
    power = 1
    while power < below:
        powers.append(power)
        power *= base
    return powers


def exponential_two(n: int) -> nx.DiGraph[int]:
    r"""Build the default graph: rank i sends to i + 1, i + 2, i + 4, …; few messages, fast mixing.

    .. math:: w_{i, i - 2^k \bmod n} = w_{ii} = 1/(t+1), \quad t = \lceil \log_2 n \rceil, \quad
              \|W - J\|_2 = (t-1)/(t+1) \text{ for even } n, \text{ smaller for odd } n

    Args:
        n: Number of ranks.

    Returns:
        A doubly stochastic directed graph with self-loops; its matrix is normal, not symmetric.

    Raises:
        TopologyError: If ``n < 1``.

    Example:
        >>> exponential_two(8).edges(0, data="weight")
        OutEdgeDataView([(0, 0, 0.25), (0, 1, 0.25), (0, 2, 0.25), (0, 4, 0.25)])

    Reference:
        Ying et al., "Exponential graph is provably efficient for decentralized deep training",
        NeurIPS 2021.
    """
    n = check_int(n, "n", "exponential_two", 1)
    return _uniform(f"exponential_two({n})", n, _powers(2, n))


def exponential(n: int, base: int = 2) -> nx.DiGraph[int]:
    """Build the exponential graph of base b: rank i sends to i + 1, i + b, i + b², … (mod n).

    The greater the base, the sparser the graph, and the slower its mixing.

    Args:
        n: Number of ranks.
        base: The b above, at least 2; with 2 it is :func:`.topology.exponential_two`.

    Returns:
        A doubly stochastic directed graph with self-loops and uniform weights.

    Raises:
        TopologyError: If ``n < 1`` or ``base < 2``.

    Example:
        >>> list(exponential(12, base=3).successors(0))
        [0, 1, 3, 9]
    """
    n = check_int(n, "n", "exponential", 1)
    base = check_int(base, "base", "exponential", 2)
    return _uniform(f"exponential({n}, {base})", n, _powers(base, n))


def symmetric_exponential(n: int, base: int = 4) -> nx.DiGraph[int]:
    """Build the symmetric exponential graph: ranks at distances 1, b, b², … exchange.

    Distances are at most half the circle, in both directions.

    Args:
        n: Number of ranks.
        base: The b above, at least 2.

    Returns:
        A symmetric doubly stochastic graph with self-loops and uniform weights.

    Raises:
        TopologyError: If ``n < 1`` or ``base < 2``.

    Example:
        >>> list(symmetric_exponential(12).successors(0))
        [0, 1, 4, 8, 11]
    """
    n = check_int(n, "n", "symmetric_exponential", 1)
    base = check_int(base, "base", "symmetric_exponential", 2)
    half = _powers(base, n // 2 + 1)
    distances = {*half, *(n - distance for distance in half)} - {n}
    return _uniform(f"symmetric_exponential({n}, {base})", n, distances)
