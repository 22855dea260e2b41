"""Star: one rank exchanges with all others."""

from __future__ import annotations

import networkx as nx

from ..checks import check_int
from ..weights import undirected

__all__ = ["star"]


def star(n: int, center: int = 0) -> nx.DiGraph[int]:
    r"""Build the star: one rank, the centre, exchanges with all others.

    .. math:: w_{ci} = w_{ic} = w_{cc} = 1/n, \quad w_{ii} = 1 - 1/n, \quad \|W - J\|_2 = 1 - 1/n

    Metropolis–Hastings weights. The centre sends n - 1 messages per step: meant for comparison, not
    for production.

    Args:
        n: Number of ranks.
        center: The rank c in the middle.

    Returns:
        A symmetric doubly stochastic graph with self-loops.

    Raises:
        TopologyError: If ``n < 1`` or the centre is no rank.

    Example:
        >>> star(4).edges(1, data="weight")
        OutEdgeDataView([(1, 1, 0.75), (1, 0, 0.25)])
    """
    n = check_int(n, "n", "star", 1)
    center = check_int(center, "center", "star", 0, n - 1)
    name = f"star({n})" if center == 0 else f"star({n}, {center})"
    return undirected(name, n, ((center, i) for i in range(n) if i != center))
