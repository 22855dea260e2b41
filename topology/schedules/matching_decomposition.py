"""Matching decomposition: each round uses one matching of a static graph's edges."""

from __future__ import annotations

from functools import partial

import networkx as nx

from ..checks import check_graph, graph_name
from ..errors import TopologyError
from ..neighbors import Neighbors
from ..schedule import Schedule, alone
from ..schedules._edge_coloring import matchings_of

__all__ = ["matching_decomposition"]


def _look_up(partners: tuple[dict[int, int], ...], rank: int, k: int) -> Neighbors:
    """Return a rank's neighbours: the partner in matching k, if there is one."""
    partner = partners[k].get(rank)
    if partner is None:
        return Neighbors(1.0, {}, ())
    return Neighbors(0.5, {partner: 0.5}, (partner,))


def matching_decomposition(graph: nx.DiGraph[int]) -> Schedule:
    r"""Build the schedule in which each edge of a static graph averages once per period, in pairs.

    .. math:: W^{(k)}_{ii} = W^{(k)}_{i,\,p_k(i)} = 1/2

    with :math:`p_k` the k-th matching of the edges; there is at most one matching more than the
    maximum degree. A rank without a partner in a matching keeps its value.

    Args:
        graph: Connected graph on the ranks 0..n-1 with both directions of every edge; its weights
            and self-loops are ignored.

    Returns:
        A schedule whose period is the number of matchings; every round is symmetric and doubly
        stochastic.

    Raises:
        TopologyError: If the graph is not connected, not on the ranks 0..n-1, or has an edge in one
            direction only.

    Example:
        >>> from asyncddp import topology
        >>> ring = matching_decomposition(topology.ring(4))
        >>> [[ring.neighbors(rank, k).dst_ranks for rank in range(4)] for k in range(2)]
        [[(1,), (0,), (3,), (2,)], [(3,), (2,), (1,), (0,)]]

    Reference:
        Misra and Gries, "A constructive proof of Vizing's theorem", 1992.
    """
    check_graph(graph, connected=True)
    name, n = f"matching_decomposition({graph_name(graph)})", graph.number_of_nodes()
    one_way = next(((i, j) for i, j in graph.edges if not graph.has_edge(j, i)), None)
    if one_way is not None:
        raise TopologyError(
            f"matching_decomposition needs a graph with both directions of every edge, but "
            f"{graph_name(graph)} has {one_way[0]} -> {one_way[1]} only; use "
            f"graph.to_undirected().to_directed(), or random_matching({n})"
        )
    if n == 1:
        return alone(name)
    matchings = matchings_of(n, {(int(i), int(j)) for i, j in graph.edges if i < j})
    partners = tuple(
        {i: j for pair in matching for i, j in (pair, pair[::-1])} for matching in matchings
    )
    return Schedule(name, n, len(partners), partial(_look_up, partners))
