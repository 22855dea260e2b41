"""BlueFog's functions that set and query the graphs between ranks and between machines."""

from __future__ import annotations

import logging
from functools import partial

import networkx as nx

from asyncddp.context import current, queries
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
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "is_machine_topo_weighted",
    "is_topo_weighted",
    "load_machine_topology",
    "load_topology",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "set_machine_topology",
    "set_topology",
]

logger = logging.getLogger("asyncddp")

in_neighbor_ranks = translate_errors()(queries.in_neighbor_ranks)
out_neighbor_ranks = translate_errors()(queries.out_neighbor_ranks)
in_neighbor_machine_ranks = translate_errors()(queries.in_neighbor_machine_ranks)
out_neighbor_machine_ranks = translate_errors()(queries.out_neighbor_machine_ranks)


@translate_errors()
def set_topology(topology: nx.DiGraph[int] | None = None, is_weighted: bool = False) -> bool:
    """Set the graph between ranks, on this rank; all ranks must set the same.

    Args:
        topology: The graph; ``ExponentialGraph(queries.size())`` if None.
        is_weighted: Whether its weights count; ranks average uniformly otherwise.

    Returns:
        True; False while there are windows, which lie along the edges of the graph in use. That
        graph with those weights may be set again all the same.

    Raises:
        TypeError: It is no directed graph on ``size()`` ranks.
    """
    chosen = ExponentialGraph(queries.size()) if topology is None else topology
    _check_graph("set_topology", chosen, queries.size(), "size()")
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
    """Set the graph between machines, on this rank; all ranks must set the same.

    Args:
        topology: The graph.
        is_weighted: Whether its weights count; machines average uniformly otherwise.

    Returns:
        True.

    Raises:
        ArgumentError: None was given.
        TypeError: It is no directed graph on ``machine_size()`` machines.
    """
    if topology is None:
        raise ArgumentError(
            "set_machine_topology: argument topology: expected a graph, got None; for example "
            f"ExponentialTwoGraph({queries.machine_size()})"
        )
    _check_graph("set_machine_topology", topology, queries.machine_size(), "machine_size()")
    if not _same(topology, load_machine_topology()) or is_weighted != is_machine_topo_weighted():
        given = UserTopology(topology, is_weighted, _schedule(topology, weighted=is_weighted))
        current_state().machine_topology = given
        current().topologies.set_machine(given.schedule)
    return True


def _same(graph: nx.DiGraph[int], in_use: GraphOrSchedule | None) -> bool:
    return isinstance(in_use, nx.DiGraph) and IsTopologyEquivalent(graph, in_use)


def _check_graph(verb: str, graph: object, places: int, which: str) -> None:
    if not isinstance(graph, nx.DiGraph):
        raise TypeError(
            f"{verb}: argument topology: expected a networkx.DiGraph, got {type(graph).__name__}"
        )
    if graph.number_of_nodes() != places:
        raise TypeError(
            f"{verb}: argument topology: expected a graph on {which} = {places} nodes, got "
            f"{graph.number_of_nodes()}"
        )


def _schedule(graph: nx.DiGraph[int], *, weighted: bool) -> Schedule:
    """Build the schedule of a graph, with its own weights or uniform ones."""
    check_digraph(graph)
    views = [in_view(graph, place, weighted=False) for place in range(graph.number_of_nodes())]
    if weighted:
        views = [
            Neighbors(*GetRecvWeights(graph, place), view.dst_ranks)
            for place, view in enumerate(views)
        ]
    return Schedule(describe(graph), len(views), 1, partial(_view, views))


def _view(views: list[Neighbors], place: int, k: int) -> Neighbors:
    del k
    return views[place]


@translate_errors()
def load_topology() -> GraphOrSchedule:
    """Return the graph in use, the object that was set."""
    given = _user_topology()
    return current().topologies.load() if given is None else given.graph


@translate_errors()
def load_machine_topology() -> GraphOrSchedule | None:
    """Return the graph between machines, the object that was set; None before."""
    given = _user_machine_topology()
    return current().topologies.load_machine() if given is None else given.graph


@translate_errors()
def is_topo_weighted() -> bool:
    """Return True if the weights of the graph in use are used."""
    given = _user_topology()
    return given is not None and given.weighted


@translate_errors()
def is_machine_topo_weighted() -> bool:
    """Return True if the weights of the graph between machines are used."""
    given = _user_machine_topology()
    return given is not None and given.weighted


def _user_topology() -> UserTopology | None:
    """Return the user's topology unless ``asyncddp.set_topology`` has replaced it."""
    kept = current_state().topology
    return kept if kept is not None and kept.schedule is current().topologies.load() else None


def _user_machine_topology() -> UserTopology | None:
    kept = current_state().machine_topology
    in_use = current().topologies.load_machine()
    return kept if kept is not None and kept.schedule is in_use else None
