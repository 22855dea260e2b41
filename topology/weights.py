"""Weights of graphs: functions that return a graph with uniform, push or Metropolis weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import networkx as nx
import numpy as np

from .checks import check_digraph, check_graph, graph_name, is_weighted
from .errors import TopologyError

__all__ = [
    "circulant",
    "from_adjacency",
    "lazy_weights",
    "metropolis_weights",
    "push_weights",
    "undirected",
    "uniform_weights",
]


def _fresh(name: str, n: int) -> nx.DiGraph[int]:
    """Make a graph on the ranks 0..n-1 without edges."""
    graph: nx.DiGraph[int] = nx.DiGraph(name=name)
    graph.add_nodes_from(range(n))
    return graph


def circulant(name: str, n: int, weights: Mapping[int, float]) -> nx.DiGraph[int]:
    """Build the circulant graph: every rank i sends to i + d with a weight per distance d.

    Args:
        name: The name of the graph.
        n: Number of ranks.
        weights: ``{d: weight}`` with 0 < d < n; each rank keeps 1 minus their sum.

    Returns:
        A doubly stochastic graph.
    """
    graph = _fresh(name, n)
    own = 1.0 - math.fsum(weights.values())
    graph.add_weighted_edges_from((i, i, own) for i in range(n))
    for distance, weight in sorted(weights.items()):
        graph.add_weighted_edges_from((i, (i + distance) % n, weight) for i in range(n))
    return graph


def uniform_weights(graph: nx.DiGraph[int]) -> nx.DiGraph[int]:
    r"""Return the graph with uniform weights: ranks average over themselves and in-neighbours.

    .. math:: w_{ij} = w_{ii} = 1 / (d_i + 1)

    with :math:`d_i` the number of in-neighbours of i. Rows sum to one. Columns sum to one, too, if
    all in- and out-degrees are equal.

    Args:
        graph: Directed graph on the ranks 0..n-1; its weights and self-loops are ignored.

    Returns:
        A new graph with self-loops.

    Raises:
        TopologyError: If the graph is not an ``nx.DiGraph`` on 0..n-1.

    Example:
        >>> import networkx as nx
        >>> uniform_weights(nx.DiGraph([(0, 1), (1, 2), (2, 0)]))[0][1]
        {'weight': 0.5}
    """
    graph = check_digraph(graph)
    result = _fresh(graph_name(graph), graph.number_of_nodes())
    for i in range(graph.number_of_nodes()):
        sources = sorted(j for j in graph.pred[i] if j != i)
        share = 1.0 / (len(sources) + 1)
        result.add_edge(i, i, weight=1.0 - len(sources) * share)
        result.add_weighted_edges_from((j, i, share) for j in sources)
    return result


def push_weights(graph: nx.DiGraph[int]) -> nx.DiGraph[int]:
    r"""Return the graph with push-sum weights: ranks split values over self and out-neighbours.

    .. math:: w_{ij} = w_{jj} = 1 / (d_j + 1)

    with :math:`d_j` the number of out-neighbours of j. Columns sum to one. Meant for push-sum
    methods on directed graphs.

    Args:
        graph: Directed graph on the ranks 0..n-1; its weights and self-loops are ignored.

    Returns:
        A new graph with self-loops.

    Raises:
        TopologyError: If the graph is not an ``nx.DiGraph`` on 0..n-1.

    Example:
        >>> import networkx as nx
        >>> push_weights(nx.DiGraph([(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)])).edges(
        ...     0, data="weight"
        ... )
        OutEdgeDataView([(0, 0, 0.25), (0, 1, 0.25), (0, 2, 0.25), (0, 3, 0.25)])

    Reference:
        Kempe, Dobra and Gehrke, "Gossip-based computation of aggregate information", FOCS 2003.
    """
    graph = check_digraph(graph)
    result = _fresh(graph_name(graph), graph.number_of_nodes())
    for j in range(graph.number_of_nodes()):
        targets = sorted(i for i in graph.succ[j] if i != j)
        share = 1.0 / (len(targets) + 1)
        result.add_edge(j, j, weight=1.0 - len(targets) * share)
        result.add_weighted_edges_from((j, i, share) for i in targets)
    return result


def metropolis_weights(graph: nx.Graph[int]) -> nx.DiGraph[int]:
    r"""Return an undirected graph with Metropolis–Hastings weights, which are doubly stochastic.

    .. math:: w_{ij} = w_{ji} = 1 / (1 + \max(d_i, d_j)), \quad w_{ii} = 1 - \sum_j w_{ij}

    with :math:`d_i` the number of neighbours of i.

    Args:
        graph: An ``nx.Graph``, or an ``nx.DiGraph`` with both directions of every edge, on the
            ranks 0..n-1; its weights and self-loops are ignored.

    Returns:
        A new graph with self-loops.

    Raises:
        TopologyError: If an edge has no counterpart, or the nodes are not 0..n-1.

    Example:
        >>> import networkx as nx
        >>> metropolis_weights(nx.path_graph(3)).edges(0, data="weight")
        OutEdgeDataView([(0, 0, 0.6666666666666667), (0, 1, 0.3333333333333333)])

    Reference:
        Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004.
    """
    undirected = isinstance(graph, nx.Graph) and not graph.is_directed()
    both = check_digraph(graph.to_directed() if undirected else graph)
    n = both.number_of_nodes()
    neighbors = [sorted(j for j in both.succ[i] if j != i) for i in range(n)]
    degrees = [len(near) for near in neighbors]
    result = _fresh(graph_name(graph), n)
    for i, near in enumerate(neighbors):
        missing = [j for j in near if not both.has_edge(j, i)]
        if missing:
            raise TopologyError(
                f"metropolis_weights needs both directions of every edge, but {graph_name(graph)} "
                f"has {i} -> {missing[0]} only; use graph.to_undirected(), or push_weights(graph) "
                "for a directed method"
            )
        weights = [1.0 / (1 + max(degrees[i], degrees[j])) for j in near]
        result.add_edge(i, i, weight=1.0 - math.fsum(weights))
        result.add_weighted_edges_from((i, j, w) for j, w in zip(near, weights, strict=True))
    return result


def lazy_weights(graph: nx.DiGraph[int]) -> nx.DiGraph[int]:
    r"""Return the graph with half of all weights, and 1/2 added to own weights: (I + W) / 2.

    A symmetric W then has no eigenvalue below zero, as methods such as ``d2`` need.

    Args:
        graph: Directed graph on the ranks 0..n-1; uniform weights are used if it has none.

    Returns:
        A new graph with self-loops, doubly stochastic or symmetric if the given one is.

    Raises:
        TopologyError: If the graph is not an ``nx.DiGraph`` on 0..n-1.

    Example:
        >>> lazy_weights(circulant("pair", 2, {1: 1.0})).edges(0, data="weight")
        OutEdgeDataView([(0, 0, 0.5), (0, 1, 0.5)])
    """
    graph = check_digraph(graph)
    if not is_weighted(graph):
        graph = uniform_weights(graph)
    result = _fresh(f"lazy_weights({graph_name(graph)})", graph.number_of_nodes())
    result.add_edges_from((i, i, {"weight": 0.5}) for i in range(graph.number_of_nodes()))
    for source, target, weight in graph.edges(data="weight", default=0.0):
        if source == target:
            result[source][source]["weight"] += weight / 2
        else:
            result.add_edge(source, target, weight=weight / 2)
    return result


def undirected(name: str, n: int, edges: Iterable[tuple[int, int]]) -> nx.DiGraph[int]:
    """Build an undirected graph on 0..n-1 from edges, with Metropolis–Hastings weights.

    Args:
        name: The name of the graph.
        n: Number of ranks.
        edges: Pairs of ranks, each in one direction or both.

    Returns:
        A symmetric, doubly stochastic graph with self-loops.
    """
    graph: nx.Graph[int] = nx.Graph(name=name)
    graph.add_nodes_from(range(n))
    graph.add_edges_from(edges)
    return metropolis_weights(graph)


def _entries(matrix: Any) -> tuple[list[int], list[int], list[float]]:
    """Return rows, columns and values of the nonzero entries of a dense or sparse matrix."""
    if hasattr(matrix, "tocoo"):
        coo = matrix.tocsr().tocoo()  # by rows, and what is stored twice added up
        kept = coo.data != 0
        rows, columns, values = coo.row[kept], coo.col[kept], coo.data[kept]
    else:
        rows, columns = np.nonzero(matrix)
        values = matrix[rows, columns]
    return rows.tolist(), columns.tolist(), values.astype(np.float64).tolist()


def from_adjacency(matrix: Any) -> nx.DiGraph[int]:
    r"""Build a graph from a matrix: row i has the weights of the values that rank i receives.

    Nonzero entries of a boolean or integer matrix are edges, which get uniform weights. Entries of
    a float matrix are the weights themselves: ``W[i, j]`` is the weight that rank i gives to the
    value of rank j. (``nx.to_numpy_array`` gives the transpose.)

    Args:
        matrix: Square, ``(n, n)``: an array or what ``np.asarray`` makes one of, or a scipy sparse
            matrix.

    Returns:
        A graph with self-loops.

    Raises:
        TopologyError: If the matrix is not square, or float weights are not finite or sum to one
            neither by rows nor by columns.

    Example:
        >>> from_adjacency([[0.75, 0.25], [0.25, 0.75]]).edges(data="weight")
        OutEdgeDataView([(0, 0, 0.75), (0, 1, 0.25), (1, 1, 0.75), (1, 0, 0.25)])
        >>> from_adjacency([[0, 1], [1, 0]]).edges(data="weight")
        OutEdgeDataView([(0, 0, 0.5), (0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.5)])
    """
    if not hasattr(matrix, "tocoo"):
        matrix = np.asarray(matrix)
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise TopologyError(
            f"from_adjacency needs a square matrix (n, n) with n >= 1, got shape {matrix.shape}"
        )
    if matrix.dtype.kind not in "biuf":
        raise TopologyError(
            "from_adjacency needs a boolean, integer or float matrix, got dtype "
            f"{matrix.dtype}; convert it with .astype(float)"
        )
    n = int(matrix.shape[0])
    graph = _fresh("", n)
    weighted = matrix.dtype.kind == "f"
    if weighted:
        graph.add_weighted_edges_from((i, i, 0.0) for i in range(n))
    rows, columns, values = _entries(matrix)
    graph.add_weighted_edges_from(zip(columns, rows, values, strict=True))
    if not weighted:
        return uniform_weights(graph)
    check_graph(graph)
    return graph
