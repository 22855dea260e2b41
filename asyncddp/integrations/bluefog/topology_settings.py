"""BlueFog's functions that set and query the graphs between ranks and between machines."""

from __future__ import annotations

import logging
from functools import partial

import networkx as nx

from asyncddp.context import current, ranks_and_topology
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bluefog.bluefog_state import UserTopology, current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors
from asyncddp.integrations.bluefog.topology_util import (
    ExponentialGraph,
    GetRecvWeights,
    IsTopologyEquivalent,
)
from topology import GraphOrSchedule, Neighbors, Schedule, describe
from topology.checks import check_digraph
from topology.neighbors import in_view

__all__ = [
    "in_neighbor_machine_ranks", "in_neighbor_ranks", "is_machine_topo_weighted",
    "is_topo_weighted", "load_machine_topology", "load_topology", "out_neighbor_machine_ranks",
    "out_neighbor_ranks", "set_machine_topology", "set_topology",
]  # fmt: skip

logger = logging.getLogger("asyncddp")

in_neighbor_ranks = translate_errors()(ranks_and_topology.in_neighbor_ranks)
out_neighbor_ranks = translate_errors()(ranks_and_topology.out_neighbor_ranks)
in_neighbor_machine_ranks = translate_errors()(ranks_and_topology.in_neighbor_machine_ranks)
out_neighbor_machine_ranks = translate_errors()(ranks_and_topology.out_neighbor_machine_ranks)


@translate_errors()
def set_topology(topology: nx.DiGraph[int] | None = None, is_weighted: bool = False) -> bool:
    """Set the graph between ranks, on this rank; all ranks must set the same.

    The default is ``ExponentialGraph(size())``. Ranks average uniformly unless ``is_weighted``.

    Returns:
        True; False while there are windows, which lie along the edges of the graph in use. That
        graph with those weights may be set again all the same.
    """
    chosen = ExponentialGraph(ranks_and_topology.size()) if topology is None else topology
    _check_graph("set_topology", chosen, ranks_and_topology.size(), "size()")
    kept, context = current_state(), current()
    same = _same(chosen, load_topology()) and is_weighted == is_topo_weighted()
    if same and (kept.topology is not None or context.topologies.pinned):
        return True
    if context.topologies.pinned:
        logger.error(
            "set_topology: kept the topology as it is, since the windows %s lie along its edges; "
            "call win_free() on all ranks first",
            ", ".join(map(repr, sorted(context.topologies.pinned))),
        )
        return False
    kept.topology = UserTopology(chosen, is_weighted, _schedule(chosen, weighted=is_weighted))
    context.topologies.set(kept.topology.schedule)
    return True


@translate_errors()
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
        given = UserTopology(topology, is_weighted, _schedule(topology, weighted=is_weighted))
        current_state().machine_topology = given
        current().topologies.set_machine(given.schedule)
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


def _schedule(graph: nx.DiGraph[int], *, weighted: bool) -> Schedule:
    """Build the schedule of a graph, with its own weights or uniform ones."""
    check_digraph(graph)
    views = [in_view(graph, place, weighted=False) for place in range(graph.number_of_nodes())]
    if weighted:
        own_weights = [GetRecvWeights(graph, place) for place in range(len(views))]
        pairs = zip(own_weights, views, strict=True)
        views = [Neighbors(*weights, view.dst_ranks) for weights, view in pairs]
    return Schedule(describe(graph), len(views), 1, partial(_same_each_round, views))


def _same_each_round(views: list[Neighbors], place: int, k: int) -> Neighbors:
    """Look up the neighbours; schedules can be pickled, so this is no lambda."""
    del k
    return views[place]


@translate_errors()
def load_topology() -> GraphOrSchedule:
    """Return the graph in use, the object that was set."""
    given = _given(of_machines=False)
    return current().topologies.load() if given is None else given.graph


@translate_errors()
def load_machine_topology() -> GraphOrSchedule | None:
    """Return the graph between machines, the object that was set; None before."""
    given = _given(of_machines=True)
    return current().topologies.load_machine() if given is None else given.graph


@translate_errors()
def is_topo_weighted() -> bool:
    """Return True if the weights of the graph in use are used."""
    given = _given(of_machines=False)
    return given is not None and given.weighted


@translate_errors()
def is_machine_topo_weighted() -> bool:
    """Return True if the weights of the graph between machines are used."""
    given = _given(of_machines=True)
    return given is not None and given.weighted


def _given(*, of_machines: bool) -> UserTopology | None:
    """Return the user's topology unless ``asyncddp.set_topology`` has replaced it."""
    state, topologies = current_state(), current().topologies
    kept = state.machine_topology if of_machines else state.topology
    in_use = topologies.load_machine() if of_machines else topologies.load()
    return kept if kept is not None and kept.schedule is in_use else None
