"""Complete graph: every rank exchanges with every other rank."""

from __future__ import annotations

import networkx as nx

from ..checks import check_int
from ..weights import circulant

__all__ = ["complete"]


def complete(n: int) -> nx.DiGraph[int]:
    r"""Build the complete graph: every rank exchanges with all others; one step averages exactly.

    .. math:: w_{ij} = 1/n, \quad W = J

    Args:
        n: Number of ranks.

    Returns:
        A symmetric doubly stochastic graph with self-loops and n² edges.

    Raises:
        TopologyError: If ``n < 1``.

    Example:
        >>> complete(4).edges(2, data="weight")
        OutEdgeDataView([(2, 2, 0.25), (2, 3, 0.25), (2, 0, 0.25), (2, 1, 0.25)])
    """
    n = check_int(n, "n", "complete", 1)
    return circulant(f"complete({n})", n, dict.fromkeys(range(1, n), 1.0 / n))
