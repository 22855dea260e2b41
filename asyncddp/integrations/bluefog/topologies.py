"""The graphs between ranks and between machines, set and asked for as in BlueFog."""

from __future__ import annotations

import logging
from functools import partial

import networkx as nx

from asyncddp.context import current, queries
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bluefog.errors import translated
from asyncddp.integrations.bluefog.state import Given, state
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


@translated()
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
    _insist_on_fit("set_topology", chosen, queries.size(), "size()")
    kept, context = state(), current()
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
    kept.topology = Given(chosen, is_weighted, _schedule(chosen, weighted=is_weighted))
    context.topologies.set(kept.topology.schedule)
    return True


@translated()
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
    _insist_on_fit("set_machine_topology", topology, queries.machine_size(), "machine_size()")
    if not _same(topology, load_machine_topology()) or is_weighted != is_machine_topo_weighted():
        given = Given(topology, is_weighted, _schedule(topology, weighted=is_weighted))
        state().machine_topology = given
        current().topologies.set_machine(given.schedule)
    return True


def _same(graph: nx.DiGraph[int], in_use: GraphOrSchedule | None) -> bool:
    return isinstance(in_use, nx.DiGraph) and IsTopologyEquivalent(graph, in_use)


def _insist_on_fit(verb: str, graph: object, places: int, which: str) -> None:
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
    """The graph as it is in use: with its weights, whatever they sum to, or uniform ones."""
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


@translated()
def load_topology() -> GraphOrSchedule:
    """The graph in use, the very object that was set."""
    given = _given(state().topology, current().topologies.load())
    return current().topologies.load() if given is None else given.graph


@translated()
def load_machine_topology() -> GraphOrSchedule | None:
    """The graph between machines in use, the very object that was set; None before."""
    given = _given(state().machine_topology, current().topologies.load_machine())
    return current().topologies.load_machine() if given is None else given.graph


@translated()
def is_topo_weighted() -> bool:
    """Whether the weights of the graph in use count."""
    given = _given(state().topology, current().topologies.load())
    return given is not None and given.weighted


@translated()
def is_machine_topo_weighted() -> bool:
    """Whether the weights of the graph between machines count."""
    given = _given(state().machine_topology, current().topologies.load_machine())
    return given is not None and given.weighted


def _given(kept: Given | None, in_use: GraphOrSchedule | None) -> Given | None:
    """What was set here, unless something else was set since by ``asyncddp.set_topology``."""
    return kept if kept is not None and kept.schedule is in_use else None


@translated()
def in_neighbor_ranks() -> list[int]:
    """The ranks from which this one receives, ascending."""
    return queries.in_neighbor_ranks()


@translated()
def out_neighbor_ranks() -> list[int]:
    """The ranks to which this one sends, ascending."""
    return queries.out_neighbor_ranks()


@translated()
def in_neighbor_machine_ranks() -> list[int]:
    """The machines from which this one receives; none before a machine topology is set."""
    return queries.in_neighbor_machine_ranks()


@translated()
def out_neighbor_machine_ranks() -> list[int]:
    """The machines to which this one sends; none before a machine topology is set."""
    return queries.out_neighbor_machine_ranks()
