"""Schedules of time-varying graphs: the class ``Schedule``, and conversion of static graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias, Union

from .checks import check_digraph, check_graph, check_int, check_rank, graph_name, is_weighted
from .neighbors import Neighbors, in_view

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["GraphOrSchedule", "Schedule", "alone", "as_schedule", "describe", "neighbors_of"]

LookUp: TypeAlias = Callable[[int, int], Neighbors]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    r"""Schedule of graphs, one per round, that every rank computes without communication.

    .. math:: x_i^{(k+1)} = \sum_j W^{(k)}_{ij} x_j^{(k)}

    A schedule is data plus one function from (rank, round) to that rank's neighbours. All ranks
    hold the same schedule and count the same rounds, so nothing is negotiated. Users make own
    schedules with this constructor; a schedule is picklable if its function is.

    Args:
        name: Name in messages, such as ``"one_peer_exponential(8)"``.
        n: Number of ranks.
        period: Number of rounds after which it repeats; None if it never does.
        look_up: ``look_up(rank, k)`` gives the neighbours of ``rank`` in round ``k``, with ``k``
            below the period. It must be deterministic, and consistent: rank i receives from j
            exactly where j sends to i.

    Raises:
        TopologyError: If ``n`` or ``period`` is below one.

    Example:
        >>> swap = Schedule(
        ...     "swap", 2, 1, lambda rank, k: Neighbors(0.0, {1 - rank: 1.0}, (1 - rank,))
        ... )
        >>> swap.neighbors(rank=0, k=7)
        Neighbors(self_weight=0.0, src_weights={1: 1.0}, dst_ranks=(1,))
        >>> swap.graph(0).edges(data="weight")
        OutEdgeDataView([(0, 0, 0.0), (0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0)])
    """

    name: str
    n: int
    period: int | None
    look_up: LookUp = field(repr=False)

    def __post_init__(self) -> None:
        check_int(self.n, "n", self.name, 1)
        if self.period is not None:
            check_int(self.period, "period", self.name, 1)

    def neighbors(self, rank: int, k: int) -> Neighbors:
        """Return the neighbours of one rank in one round, in O(degree) if the family allows.

        Args:
            rank: The rank, 0..n-1.
            k: The round, from 0.

        Returns:
            Self weight, weights by source rank, and ranks sent to.

        Raises:
            TopologyError: If there is no such rank or round.
        """
        rank = check_rank(rank, self.n, self.name)
        k = check_int(k, "k", self.name, 0)
        return self.look_up(rank, k if self.period is None else k % self.period)

    def graph(self, k: int) -> nx.DiGraph[int]:
        """Return the weighted graph of one round, with self-loops.

        Args:
            k: The round, from 0.

        Returns:
            A new graph on the ranks 0..n-1.

        Raises:
            TopologyError: If ``k`` is negative.
        """
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph(
            name=self.name if self.period == 1 else f"{self.name}, round {k}"
        )
        graph.add_nodes_from(range(self.n))
        for rank in range(self.n):
            near = self.neighbors(rank, k)
            graph.add_edge(rank, rank, weight=near.self_weight)
            graph.add_weighted_edges_from((j, rank, w) for j, w in near.src_weights.items())
        return graph

    def iterate(self, rank: int) -> Iterator[Neighbors]:
        """Iterate endlessly over the neighbours of one rank, from round 0 on.

        Args:
            rank: The rank, 0..n-1.

        Yields:
            The neighbours in the next round.

        Raises:
            TopologyError: If there is no such rank.

        Example:
            >>> from asyncddp import topology
            >>> rounds = topology.one_peer_exponential(8).iterate(rank=0)
            >>> [next(rounds).dst_ranks for _ in range(4)]
            [(1,), (2,), (4,), (1,)]
        """
        for k in count():
            yield self.neighbors(rank, k)


def _keep(rank: int, k: int) -> Neighbors:
    """Return the neighbours of a single rank: none."""
    del rank, k
    return Neighbors(1.0, {}, ())


def without_ranks(schedule: Schedule, left: Collection[int]) -> Schedule:
    r"""Return a schedule without some ranks, whose weights go to the other ranks' own.

    .. math:: w'_{ii} = w_{ii} + \sum_{j \in D} w_{ij}, \qquad w'_{ij} = w_{ij}\ (i, j \notin D)

    Where the other ranks are no longer strongly connected, edges between their parts are left out
    in the same way: along these, push-sum would give all its weight away.

    Args:
        schedule: Schedule on the ranks 0..n-1.
        left: The ranks D that have left; each keeps its own value.
    """
    parts = connected_parts(schedule, left)
    part_of = {rank: number for number, part in enumerate(parts) for rank in part}
    name = f"{schedule.name} without {sorted(left)}"
    return Schedule(name, schedule.n, schedule.period, partial(_within_parts, schedule, part_of))


def connected_parts(schedule: Schedule, left: Collection[int] = ()) -> list[frozenset[int]]:
    """List the parts of a schedule that stay strongly connected without some ranks.

    Args:
        schedule: Schedule on the ranks 0..n-1; one that never repeats counts as connected.
        left: The ranks that have left.

    Returns:
        The parts, by their lowest ranks.
    """
    import networkx as nx

    here = set(range(schedule.n)).difference(left)
    if schedule.period is None:
        return [frozenset(here)]
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(here)
    for k in range(schedule.period):
        for rank in here:
            targets = here.intersection(schedule.look_up(rank, k).dst_ranks)
            graph.add_edges_from((rank, target) for target in targets)
    return sorted(map(frozenset, nx.strongly_connected_components(graph)), key=min)


def between_ranks(schedule: Schedule, members: Sequence[int], n: int) -> Schedule:
    """Return a schedule of some of the ranks 0..n-1, which take its places in their order.

    Args:
        schedule: Schedule on as many places as there are members.
        members: The ranks that take part, ascending; each other rank keeps its own value.
        n: Number of ranks.
    """
    places = {rank: place for place, rank in enumerate(members)}
    look_up = partial(_between_members, schedule, tuple(members), places)
    return Schedule(f"{schedule.name} of ranks {list(members)}", n, schedule.period, look_up)


def _between_members(
    schedule: Schedule, members: tuple[int, ...], places: dict[int, int], rank: int, k: int
) -> Neighbors:
    """Look up a rank's neighbours among the members."""
    if rank not in places:
        return _keep(rank, k)
    near = schedule.look_up(places[rank], k)
    return Neighbors(
        near.self_weight,
        {members[place]: weight for place, weight in near.src_weights.items()},
        tuple(members[place] for place in near.dst_ranks),
    )


def _within_parts(schedule: Schedule, part_of: dict[int, int], rank: int, k: int) -> Neighbors:
    """Look up a rank's neighbours in its part of the ranks."""
    part = part_of.get(rank)
    if part is None:
        return _keep(rank, k)
    near = schedule.look_up(rank, k)
    moved = [w for source, w in near.src_weights.items() if part_of.get(source) != part]
    return Neighbors(
        math.fsum([near.self_weight, *moved]),
        {source: w for source, w in near.src_weights.items() if part_of.get(source) == part},
        tuple(target for target in near.dst_ranks if part_of.get(target) == part),
    )


def alone(name: str) -> Schedule:
    """Return the schedule of a single rank, on which nothing is sent, for any family."""
    return Schedule(name, 1, 1, _keep)


GraphOrSchedule: TypeAlias = Union["nx.DiGraph[int]", Schedule]


def _same_each_round(table: tuple[Neighbors, ...], rank: int, k: int) -> Neighbors:
    """Look up a rank's neighbours in a static graph."""
    del k
    return table[rank]


def as_schedule(graph_or_schedule: GraphOrSchedule) -> Schedule:
    """Convert a static graph to a schedule of period 1; return a schedule unchanged.

    The graph is checked and read once: later changes to it do not affect the schedule. Without
    weights, each rank averages uniformly over itself and its in-neighbours: 1 / (in-degree + 1).

    Args:
        graph_or_schedule: An ``nx.DiGraph`` on the ranks 0..n-1, or a schedule.

    Returns:
        A schedule with the graph's name.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.

    Example:
        >>> from asyncddp import topology
        >>> topology.as_schedule(topology.ring(5))
        Schedule(name='ring(5)', n=5, period=1)
    """
    if isinstance(graph_or_schedule, Schedule):
        return graph_or_schedule
    graph = graph_or_schedule
    check_graph(graph)
    weighted = is_weighted(graph)
    n = graph.number_of_nodes()
    table = tuple(in_view(graph, rank, weighted) for rank in range(n))
    return Schedule(graph_name(graph), n, 1, partial(_same_each_round, table))


def describe(graph_or_schedule: GraphOrSchedule) -> str:
    """Return the name of a graph or schedule for messages.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        A text such as ``"ring(8)"``, or ``"a graph on 8 ranks"`` if a graph has no name.

    Raises:
        TopologyError: If it is neither.

    Example:
        >>> import networkx as nx
        >>> describe(nx.DiGraph([(0, 1), (1, 0)]))
        'a graph on 2 ranks'
    """
    if isinstance(graph_or_schedule, Schedule):
        return graph_or_schedule.name
    return graph_name(graph_or_schedule)


def neighbors_of(graph_or_schedule: GraphOrSchedule, rank: int, k: int = 0) -> Neighbors:
    """Return the neighbours of one rank in a graph, or in round ``k`` of a schedule.

    Args:
        graph_or_schedule: A graph (without weights: uniform ones are used) or a schedule.
        rank: The rank, 0..n-1.
        k: The round, from 0; a graph is the same in all rounds.

    Returns:
        Self weight, weights by source rank, and ranks sent to.

    Raises:
        TopologyError: If there is no such rank or round, or the graph is no ``nx.DiGraph``.

    Example:
        >>> from asyncddp import topology
        >>> topology.neighbors_of(topology.one_peer_exponential(8), rank=0, k=1)
        Neighbors(self_weight=0.5, src_weights={6: 0.5}, dst_ranks=(2,))
    """
    if isinstance(graph_or_schedule, Schedule):
        return graph_or_schedule.neighbors(rank, k)
    graph = check_digraph(graph_or_schedule)
    rank = check_rank(rank, graph.number_of_nodes(), "neighbors_of")
    return in_view(graph, rank, is_weighted(graph))
