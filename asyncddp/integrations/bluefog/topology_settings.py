"""BlueFog's functions that set and query the graphs between ranks and between machines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import networkx as nx

from asyncddp.context import current, ranks_and_topology
from asyncddp.context.ranks_and_topology import (
    in_neighbor_machine_ranks,
    in_neighbor_ranks,
    out_neighbor_machine_ranks,
    out_neighbor_ranks,
)
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bluefog.error_translation import translate_errors_of
from asyncddp.integrations.bluefog.topology_util import (
    ExponentialGraph,
    GetRecvWeights,
    IsTopologyEquivalent,
)
from asyncddp.topology import GraphOrSchedule, Neighbors, Schedule, describe
from asyncddp.topology.checks import check_digraph
from asyncddp.topology.neighbors import in_view

__all__ = [
    "in_neighbor_machine_ranks", "in_neighbor_ranks", "is_machine_topo_weighted",
    "is_topo_weighted", "load_machine_topology", "load_topology", "out_neighbor_machine_ranks",
    "out_neighbor_ranks", "set_machine_topology", "set_topology",
]  # fmt: skip

logger = logging.getLogger("asyncddp")


@dataclass(frozen=True, slots=True, eq=False)
class _UserGraphSchedule(Schedule):
    """Schedule that uses the user's graph in every round, with its own weights or uniform ones."""

    user_graph: nx.DiGraph[int]
    weighted: bool


def set_topology(topology: nx.DiGraph[int] | None = None, is_weighted: bool = False) -> bool:
    """Set the graph between ranks, on this rank; all ranks must set the same.

    The default is ``ExponentialGraph(size())``. Ranks average uniformly unless ``is_weighted``.

    Returns:
        True; False while there are windows, which lie along the edges of the graph in use. That
        graph with those weights may be set again all the same.
    """
    chosen = ExponentialGraph(ranks_and_topology.size()) if topology is None else topology
    _check_graph("set_topology", chosen, ranks_and_topology.size(), "size()")
    topologies = current().topologies
    same = _same(chosen, load_topology()) and is_weighted == is_topo_weighted()
    if same and (isinstance(topologies.given, _UserGraphSchedule) or topologies.pinned):
        return True
    if topologies.pinned:
        logger.error(
            "set_topology: kept the topology as it is, since the windows %s lie along its edges; "
            "call win_free() on all ranks first",
            ", ".join(map(repr, sorted(topologies.pinned))),
        )
        return False
    topologies.set(_schedule(chosen, weighted=is_weighted))
    return True


def set_machine_topology(
    topology: nx.DiGraph[int] | None = None, is_weighted: bool = False
) -> bool:
    """Set the graph between machines, on this rank; all ranks must set the same; return True.

    Machines average uniformly unless ``is_weighted``.
    """
    if topology is None:
        raise ArgumentError(
            "set_machine_topology: argument topology: expected a graph, got None; for example "
            f"ExponentialTwoGraph({ranks_and_topology.machine_size()})"
        )
    _check_graph(
        "set_machine_topology", topology, ranks_and_topology.machine_size(), "machine_size()"
    )
    if not _same(topology, load_machine_topology()) or is_weighted != is_machine_topo_weighted():
        current().topologies.set_machine(_schedule(topology, weighted=is_weighted))
    return True


def _same(graph: nx.DiGraph[int], in_use: GraphOrSchedule | None) -> bool:
    return isinstance(in_use, nx.DiGraph) and IsTopologyEquivalent(graph, in_use)


def _check_graph(verb: str, graph: object, places: int, which: str) -> None:
    problem = f"{verb}: argument topology: expected a"
    if not isinstance(graph, nx.DiGraph):
        raise TypeError(f"{problem} networkx.DiGraph, got {type(graph).__name__}")
    nodes = graph.number_of_nodes()
    if nodes != places:
        raise TypeError(f"{problem} graph on {which} = {places} nodes, got {nodes}")


def _schedule(graph: nx.DiGraph[int], *, weighted: bool) -> _UserGraphSchedule:
    check_digraph(graph)
    views = [in_view(graph, place, weighted=False) for place in range(graph.number_of_nodes())]
    if weighted:
        own_weights = [GetRecvWeights(graph, place) for place in range(len(views))]
        pairs = zip(own_weights, views, strict=True)
        views = [Neighbors(*weights, view.dst_ranks) for weights, view in pairs]
    look_up = partial(_same_each_round, views)
    return _UserGraphSchedule(describe(graph), len(views), 1, look_up, graph, weighted)


def _same_each_round(views: list[Neighbors], place: int, k: int) -> Neighbors:
    """Return the neighbours of a place in any round; it can be pickled, unlike a lambda."""
    return views[place]


def load_topology() -> GraphOrSchedule:
    """Return the graph in use, as the object that was set."""
    in_use = current().topologies.given
    return in_use.user_graph if isinstance(in_use, _UserGraphSchedule) else in_use


def load_machine_topology() -> GraphOrSchedule | None:
    """Return the graph between machines, as the object that was set; None if none was set."""
    in_use = current().topologies.machine_given
    return in_use.user_graph if isinstance(in_use, _UserGraphSchedule) else in_use


def is_topo_weighted() -> bool:
    """Return True if the weights of the graph in use are used."""
    in_use = current().topologies.given
    return isinstance(in_use, _UserGraphSchedule) and in_use.weighted


def is_machine_topo_weighted() -> bool:
    """Return True if the weights of the graph between machines are used."""
    in_use = current().topologies.machine_given
    return isinstance(in_use, _UserGraphSchedule) and in_use.weighted


translate_errors_of(globals(), __all__)
