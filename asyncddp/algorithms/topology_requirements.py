"""Requirements of an algorithm on the communication topology, with their check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import networkx
import numpy as np

from asyncddp import topology
from asyncddp.topology import GraphOrSchedule, Schedule, TopologyError
from asyncddp.topology.matrices import rounds_of

_ROUNDS = 1024  # of a schedule that are checked


@dataclass(frozen=True)
class TopologyRequirements:
    """Properties that an algorithm requires of the topology's mixing matrices W.

    Attributes:
        doubly_stochastic: Rows and columns sum to one, so that the mean over ranks is kept.
        column_stochastic: Columns sum to one.
        symmetric: W equals its transpose.
        strongly_connected: There is a path from each rank to each other, over a schedule's period.
        min_eigenvalue: All eigenvalues of a static graph's W have a larger real part than this.
        static_only: The graph is the same in every round (no time-varying schedule).
        tree: Its edges, each in both directions, form a tree.
        uniform: Each rank averages all ranks, itself among them, with equal weights.
        pairs: In each round of a schedule a rank has one neighbour at most; of a static graph the
            edges are taken in turn, by
            :func:`.topology.matching_decomposition`.

    Example:
        >>> symmetric = TopologyRequirements(symmetric=True)
        >>> symmetric.check("exact_diffusion", topology.exponential_two(8))
        ... # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        asyncddp.topology.errors.TopologyError: exact_diffusion cannot run on exponential_two(8):
        its weights are not symmetric, but exact_diffusion needs w_ij = w_ji. Use topology.ring(8)
        instead
    """

    doubly_stochastic: bool = False
    column_stochastic: bool = False
    symmetric: bool = False
    strongly_connected: bool = False
    min_eigenvalue: float | None = None
    static_only: bool = False
    tree: bool = False
    uniform: bool = False
    pairs: bool = False

    def check(
        self, method: str, graph_or_schedule: GraphOrSchedule, alternative: str | None = None
    ) -> None:
        """Raise an error if a topology does not fulfil the requirements of the named method.

        Args:
            method: Name of the method.
            graph_or_schedule: The topology.
            alternative: Name of a method that works on any doubly stochastic one.

        Raises:
            TopologyError: A property is missing; the message names a graph that has it.
        """
        for problem in self.problems(graph_or_schedule, method):
            name = topology.describe(graph_or_schedule)
            instead = f"Use {self._suggest_topology(graph_or_schedule)} instead"
            if alternative is not None and topology.is_doubly_stochastic(graph_or_schedule):
                instead += f", or algorithm={alternative!r} on this one"
            raise TopologyError(f"{method} cannot run on {name}: {problem}. {instead}")

    def problems(self, given: GraphOrSchedule, method: str = "the method") -> Iterator[str]:
        """Yield each unmet requirement, cheapest checks first."""
        static = not isinstance(given, Schedule) or given.period == 1
        if self.static_only and not static:
            yield f"it changes from round to round, but {method} needs a graph that stays the same"
        yield from self._shape_problems(given, method, static=static)
        if self.doubly_stochastic and not topology.is_doubly_stochastic(given):
            yield (
                f"its weights are not doubly stochastic{_describe_worst_rank(given)}, so {method} "
                "would lead the ranks to a weighted average in place of the mean"
            )
        if self.column_stochastic and not topology.is_column_stochastic(given):
            worst = _describe_worst_rank(given)
            yield f"its weights are not column-stochastic{worst}, as {method} needs"
        if self.symmetric and not topology.is_symmetric(given):
            yield f"its weights are not symmetric, but {method} needs w_ij = w_ji"
        pair = _find_disconnected_pair(given) if self.strongly_connected else None
        if pair is not None:
            yield (
                f"nothing of rank {pair[0]} ever reaches rank {pair[1]}, but {method} needs a "
                "graph that is strongly connected"
            )
        if self.min_eigenvalue is not None and static:
            lowest = topology.min_eigenvalue(given)
            if not lowest > self.min_eigenvalue + 1e-9:
                yield (
                    f"its smallest eigenvalue is {lowest:.4g}, but {method} diverges unless it is "
                    f"above {self.min_eigenvalue:.4g}"
                )

    def _shape_problems(
        self, given: GraphOrSchedule, method: str, *, static: bool
    ) -> Iterator[str]:
        """Yield unmet requirements on the graph's edges: tree, uniform, pairs."""
        problem = _find_cycle(given) if self.tree and static else None
        if problem is not None:
            yield f"{problem}, but {method} needs a tree whose edges go both ways"
        if self.uniform and static and not _is_uniform(given):
            yield f"not every rank averages all with equal weights, but {method} needs that"
        crowded = _find_rank_with_neighbors(given) if self.pairs and not static else None
        if crowded is not None:
            yield f"rank {crowded} has several neighbours in one round, but {method} needs pairs"

    def _suggest_topology(self, given: GraphOrSchedule) -> str:
        """Suggest a suitable graph of the same size: the given one reweighted, or a known one."""
        if isinstance(given, Schedule):
            n = given.n
            if self.pairs:
                return f"topology.random_matching({n})"
        else:
            n = given.number_of_nodes()
            if all(given.has_edge(j, i) for i, j in given.edges):
                name = f"topology.metropolis_weights({topology.describe(given)})"
                if not any(self.problems(topology.metropolis_weights(given))):
                    unnamed = "topology.metropolis_weights(graph)"
                    return name if "graph on" not in name else unnamed
            if self.column_stochastic and not any(self.problems(topology.push_weights(given))):
                return "topology.push_weights(graph)"
        for family in ("exponential_two", "ring", "complete", "tree"):
            graph, name = topology.GRAPHS[family](n), f"topology.{family}({n})"
            if not any(self.problems(graph)):
                return name
            if not any(self.problems(topology.lazy_weights(graph))):
                return f"topology.lazy_weights({name})"
        return "another method"


def pairs_along(given: GraphOrSchedule) -> Schedule:
    """Return rounds of pairs: a schedule unchanged, or the edges of a static graph in turn."""
    if isinstance(given, Schedule):
        return given if given.period != 1 else topology.matching_decomposition(given.graph(0))
    return topology.matching_decomposition(given)


def _find_rank_with_neighbors(given: GraphOrSchedule) -> int | None:
    """Find a rank with several neighbours in one round; None if there is none."""
    for matrix in rounds_of(given):
        count = np.bincount(matrix.rows, minlength=matrix.n)  # with the diagonal entry
        if count.max() > 2:
            return int(count.argmax())
    return None


def _is_uniform(given: GraphOrSchedule) -> bool:
    """Return whether all weights are 1 / n, to 1e-9."""
    n = topology.as_schedule(given).n
    return bool((abs(topology.mixing_matrix(given) - 1.0 / n) <= 1e-9).all())


def _find_disconnected_pair(given: GraphOrSchedule) -> tuple[int, int] | None:
    """Find a pair of ranks without a path from the first to the second; None if there is none."""
    schedule = topology.as_schedule(given)
    edges: networkx.DiGraph[object] = networkx.DiGraph()
    edges.add_nodes_from(range(schedule.n))
    for k in range(min(schedule.period or _ROUNDS, _ROUNDS)):
        for rank in range(schedule.n):
            edges.add_edges_from((rank, peer) for peer in schedule.neighbors(rank, k).dst_ranks)
    reached, reaching = networkx.descendants(edges, 0), networkx.ancestors(edges, 0)
    for rank in range(1, schedule.n):
        if rank not in reached:
            return 0, rank
    return next(((rank, 0) for rank in range(1, schedule.n) if rank not in reaching), None)


def _find_cycle(given: GraphOrSchedule) -> str | None:
    """Describe why a static graph is not a bidirectional tree; None if it is one."""
    graph = topology.as_schedule(given).graph(0)
    pairs = {(min(i, j), max(i, j)) for i, j in graph.edges if i != j}
    one_way = next(((i, j) for i, j in graph.edges if not graph.has_edge(j, i)), None)
    if one_way is not None:
        return f"rank {one_way[0]} sends to rank {one_way[1]}, which sends nothing back"
    undirected: networkx.Graph[int] = networkx.Graph()
    undirected.add_nodes_from(graph.nodes)
    undirected.add_edges_from(pairs)
    cycles = networkx.cycle_basis(undirected)
    if cycles:
        return f"its edges go round in a cycle, as {', '.join(map(str, cycles[0]))}"
    return None if networkx.is_connected(undirected) else "its parts are not connected"


def _describe_worst_rank(given: GraphOrSchedule) -> str:
    """Format the rank whose outgoing weights' sum deviates most from 1, for small graphs."""
    n = given.n if isinstance(given, Schedule) else given.number_of_nodes()
    if n > 1024 or (isinstance(given, Schedule) and given.period != 1):
        return ""
    outgoing = topology.mixing_matrix(given).sum(axis=0)
    rank = int(abs(outgoing - 1.0).argmax())
    return f" (what rank {rank} gives sums to {outgoing[rank]:.4g})"
