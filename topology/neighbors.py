"""One rank's view of a graph: from whom it receives, with which weights, and to whom it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from topology.checks import check_digraph, check_rank, is_weighted

if TYPE_CHECKING:
    import networkx as nx

    from topology.schedule import Schedule

__all__ = ["Neighbors", "average_over", "in_view", "neighbors_of"]


@dataclass(frozen=True, slots=True)
class Neighbors:
    r"""What one rank needs to know of one round.

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_{j \in \text{src}} w_{ij} x_j

    Attributes:
        self_weight: :math:`w_{ii}`, the weight of the rank's own value.
        src_weights: ``{j: w_ij}``, the ranks received from, ascending, without the rank itself.
        dst_ranks: The ranks sent to, ascending, without the rank itself.

    Example:
        >>> import topology
        >>> topology.neighbors_of(topology.ring(4, style="right"), 0)
        Neighbors(self_weight=0.5, src_weights={3: 0.5}, dst_ranks=(1,))
    """

    self_weight: float
    src_weights: dict[int, float]
    dst_ranks: tuple[int, ...]


def average_over(rank: int, members: Sequence[int]) -> Neighbors:
    """The view of one rank in a group that averages among itself.

    Args:
        rank: Whose view.
        members: The group, ascending, with the rank in it.

    Returns:
        Equal weights for all members; a group of one keeps its value.
    """
    others = tuple(member for member in members if member != rank)
    share = 1.0 / len(members)
    return Neighbors(1.0 - len(others) * share, dict.fromkeys(others, share), others)


def in_view(graph: nx.DiGraph[int], rank: int, weighted: bool) -> Neighbors:
    """One rank's view of a graph that was checked before.

    Args:
        graph: Graph on the ranks 0..n-1.
        rank: Whose view.
        weighted: Whether the graph's weights count; if not, every rank averages uniformly over
            itself and its in-neighbours, whether it has a self-loop or not.

    Returns:
        The record of the rank; its self weight is 0 where a weighted graph has no self-loop.
    """
    edges: dict[int, dict[str, Any]] = graph.pred[rank]
    sources = sorted(int(j) for j in edges if j != rank)
    targets = tuple(sorted(int(j) for j in graph.succ[rank] if j != rank))
    if not weighted:
        share = 1.0 / (len(sources) + 1)
        return Neighbors(1.0 - len(sources) * share, dict.fromkeys(sources, share), targets)
    own = float(edges[rank]["weight"]) if rank in edges else 0.0
    return Neighbors(own, {j: float(edges[j]["weight"]) for j in sources}, targets)


def neighbors_of(graph_or_schedule: nx.DiGraph[int] | Schedule, rank: int, k: int = 0) -> Neighbors:
    """The neighbours of one rank in a graph, or in round ``k`` of a schedule, in O(degree).

    Args:
        graph_or_schedule: A graph (without weights: uniform ones are used) or a schedule.
        rank: The rank asked about, 0..n-1.
        k: The round, from 0; a graph is the same in all rounds.

    Returns:
        Self weight, weights by source rank, and ranks sent to.

    Raises:
        TopologyError: If there is no such rank or round, or the graph is no ``nx.DiGraph``.

    Example:
        >>> import topology
        >>> topology.neighbors_of(topology.one_peer_exponential(8), rank=0, k=1)
        Neighbors(self_weight=0.5, src_weights={6: 0.5}, dst_ranks=(2,))
    """
    from topology.schedule import Schedule

    if isinstance(graph_or_schedule, Schedule):
        return graph_or_schedule.neighbors(rank, k)
    graph = check_digraph(graph_or_schedule)
    rank = check_rank(rank, graph.number_of_nodes(), "neighbors_of")
    return in_view(graph, rank, is_weighted(graph))
