"""Neighbours of one rank: the ranks it receives from, with weights, and the ranks it sends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx


__all__ = ["Neighbors", "average_over", "in_view"]


@dataclass(frozen=True, slots=True)
class Neighbors:
    r"""Neighbours of one rank in one round: own weight, source ranks with weights, target ranks.

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_{j \in \text{src}} w_{ij} x_j

    Attributes:
        self_weight: :math:`w_{ii}`, the weight of the rank's own value.
        src_weights: ``{j: w_ij}``, the ranks received from, ascending, without the rank itself.
        dst_ranks: The ranks sent to, ascending, without the rank itself.

    Example:
        >>> from asyncddp import topology
        >>> topology.neighbors_of(topology.ring(4, style="right"), 0)
        Neighbors(self_weight=0.5, src_weights={3: 0.5}, dst_ranks=(1,))
    """

    self_weight: float
    src_weights: dict[int, float]
    dst_ranks: tuple[int, ...]


def average_over(rank: int, members: Sequence[int]) -> Neighbors:
    """Return the neighbours of a rank in a group whose members average with equal weights.

    Args:
        rank: The rank.
        members: The group, ascending, with the rank in it.

    Returns:
        Equal weights for all members; a group of one keeps its value.
    """
    others = tuple(member for member in members if member != rank)
    share = 1.0 / len(members)
    return Neighbors(1.0 - len(others) * share, dict.fromkeys(others, share), others)


def in_view(graph: nx.DiGraph[int], rank: int, weighted: bool) -> Neighbors:
    """Return the neighbours of a rank in a graph that was checked before.

    Args:
        graph: Graph on the ranks 0..n-1.
        rank: The rank.
        weighted: Whether to use the graph's weights; if not, every rank averages uniformly over
            itself and its in-neighbours, with or without a self-loop.

    Returns:
        The neighbours; the self weight is 0 if a weighted graph has no self-loop.
    """
    edges: dict[int, dict[str, Any]] = graph.pred[rank]
    sources = sorted(int(j) for j in edges if j != rank)
    targets = tuple(sorted(int(j) for j in graph.succ[rank] if j != rank))
    if not weighted:
        share = 1.0 / (len(sources) + 1)
        return Neighbors(1.0 - len(sources) * share, dict.fromkeys(sources, share), targets)
    own = float(edges[rank]["weight"]) if rank in edges else 0.0
    return Neighbors(own, {j: float(edges[j]["weight"]) for j in sources}, targets)
