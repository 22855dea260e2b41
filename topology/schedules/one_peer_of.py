"""One-peer schedule of any static graph: each rank sends to one of its neighbours per round."""

from __future__ import annotations

import math
from functools import partial

import networkx as nx

from ..checks import check_graph, graph_name
from ..neighbors import Neighbors
from ..schedule import Schedule, alone

__all__ = ["one_peer_of"]

Ranks = tuple[int, ...]


def _look_up(
    targets: tuple[Ranks, ...], sources: tuple[Ranks, ...], rank: int, k: int
) -> Neighbors:
    """Return a rank's neighbours: its k-th target, and all ranks whose k-th target it is."""

    def target(i: int) -> int:
        """Return the target of rank i in this round."""
        return targets[i][k % len(targets[i])]

    now = [j for j in sources[rank] if target(j) == rank]
    share = 1.0 / (len(now) + 1)
    return Neighbors(1.0 - len(now) * share, dict.fromkeys(now, share), (target(rank),))


def one_peer_of(graph: nx.DiGraph[int]) -> Schedule:
    r"""Build the schedule in which each rank sends to one neighbour of a graph per round, in turn.

    .. math:: w_{ij} = w_{ii} = 1 / (|S_i^{(k)}| + 1)

    with :math:`S_i^{(k)}` the ranks that send to i in round k: one rank on vertex-transitive graphs
    (rings, exponential graphs, …), so that every round is doubly stochastic. On other graphs
    (stars, grids) a rank receives from none or several, only the rows sum to one, and the consensus
    is not the average. Neighbours take turns clockwise.

    Args:
        graph: Connected directed graph on the ranks 0..n-1; its weights and self-loops are
            ignored.

    Returns:
        A schedule whose period is the least common multiple of the out-degrees.

    Raises:
        TopologyError: If the graph is not connected or not on the ranks 0..n-1.

    Example:
        >>> from asyncddp import topology
        >>> schedule = one_peer_of(topology.star(4))
        >>> schedule.neighbors(rank=0, k=1).dst_ranks, schedule.neighbors(rank=2, k=1).dst_ranks
        ((2,), (0,))
    """
    check_graph(graph, connected=True)
    n = graph.number_of_nodes()
    name = f"one_peer_of({graph_name(graph)})"
    if n == 1:
        return alone(name)
    targets = tuple(
        tuple(sorted((int(j) for j in graph.succ[i] if j != i), key=lambda j: (j - i) % n))
        for i in range(n)
    )
    sources = tuple(tuple(sorted(int(j) for j in graph.pred[i] if j != i)) for i in range(n))
    period = math.lcm(*map(len, targets))
    return Schedule(name, n, period, partial(_look_up, targets, sources))
