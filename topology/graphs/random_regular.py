"""Random regular graphs: every rank exchanges with the same number of random others."""

from __future__ import annotations

import random

import networkx as nx

from ..checks import check_int
from ..errors import TopologyError
from ..weights import undirected

__all__ = ["random_regular"]


def random_regular(n: int, degree: int, seed: int) -> nx.DiGraph[int]:
    r"""Build a random regular graph, a good expander: every rank has the same number of neighbours.

    .. math:: w_{ij} = w_{ii} = 1/(d+1), \quad \|W - J\|_2 \approx (1 + 2\sqrt{d-1}) / (d+1)

    It is drawn again from the same random stream until it is connected. A single rank has no
    neighbours, whatever the degree.

    Args:
        n: Number of ranks.
        degree: Number d of neighbours of each rank, below n; n * degree must be even.
        seed: Seed of the stream; all ranks must use the same one.

    Returns:
        A symmetric doubly stochastic, connected graph with self-loops.

    Raises:
        TopologyError: If there is no such connected graph.

    Example:
        >>> {len(graph) for _, graph in random_regular(16, 4, seed=0).adjacency()}
        {5}

    Reference:
        Friedman, "A proof of Alon's second eigenvalue conjecture", 2003.
    """
    n = check_int(n, "n", "random_regular", 1)
    degree = check_int(degree, "degree", "random_regular", 1)
    seed = check_int(seed, "seed", "random_regular", 0)
    name = f"random_regular({n}, {degree}, seed={seed})"
    if n == 1:
        return undirected(name, n, ())
    problem = _impossible(n, degree)
    if problem:
        possible = (d for d in range(1, n) if not _impossible(n, d))
        near = min(possible, key=lambda d: abs(d - degree))
        raise TopologyError(
            f"random_regular(n={n}, degree={degree}) {problem}; nearest: degree={near}"
        )
    stream = random.Random(seed)
    while True:
        graph: nx.Graph[int] = nx.random_regular_graph(degree, n, seed=stream)
        if nx.is_connected(graph):
            return undirected(name, n, graph.edges())


def _impossible(n: int, degree: int) -> str:
    """Return why no connected graph of this degree exists on n > 1 ranks; empty if one exists."""
    if not 1 <= degree < n:
        return f"needs a degree in 1..{n - 1}"
    if n * degree % 2:
        return f"has an odd sum of degrees, {n * degree}, which no graph has"
    if degree == 1 and n > 2:
        return "falls apart into pairs and is not connected"
    return ""
