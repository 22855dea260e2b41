"""Validation of graph builders' arguments, and of graphs that users pass."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from .errors import TopologyError

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "check_choice",
    "check_digraph",
    "check_graph",
    "check_int",
    "check_power_of_two",
    "check_rank",
    "graph_name",
    "is_weighted",
]

TOLERANCE = 1e-9  # of a row or column sum


def check_int(value: Any, name: str, family: str, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int between ``low`` and ``high``, both included.

    Raises:
        TopologyError: If it is no integer or out of range; the message names the nearest value.
    """
    wanted = f">= {low}" if high is None else f"in {low}..{high}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TopologyError(
            f"{family} needs an integer {name} {wanted}, got {name}={value!r}"
        ) from None
    if number < low or (high is not None and number > high):
        nearest = low if number < low or high is None else high
        raise TopologyError(
            f"{family} needs {name} {wanted}, got {name}={number}; nearest: {name}={nearest}"
        )
    return number


def check_rank(rank: Any, n: int, family: str) -> int:
    """Return ``rank`` as an int in 0..n-1, or raise a :class:`TopologyError`."""
    return check_int(rank, "rank", family, 0, n - 1)


def check_choice(value: Any, name: str, family: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``, or raise a :class:`TopologyError`."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise TopologyError(f"{family} needs {name} to be one of {known}, got {name}={value!r}")
    return str(value)


def check_power_of_two(n: int, name: str, family: str, instead: str) -> int:
    """Return ``log2(n)`` of a power of two.

    Raises:
        TopologyError: If ``n`` is none; the message names both neighbours and ``instead``.
    """
    if n & (n - 1):
        low = 1 << (n.bit_length() - 1)
        raise TopologyError(
            f"{family} needs {name} to be a power of two, got {name}={n}; "
            f"nearest: {low}, {2 * low}, or use {instead}"
        )
    return n.bit_length() - 1


def check_is_graph(graph: Any) -> None:
    """Raise a :class:`TopologyError` unless ``graph`` is a networkx graph."""
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise TopologyError(
            f"expected a networkx.DiGraph or a topology.Schedule, got {type(graph).__name__}; "
            "build one with topology.ring(n), topology.one_peer_exponential(n), …"
        )


def graph_name(graph: Any) -> str:
    """Return a graph's name for messages; an unnamed graph is described by its size."""
    check_is_graph(graph)
    name = graph.graph.get("name")
    return str(name) if name else f"a graph on {graph.number_of_nodes()} ranks"


def is_weighted(graph: nx.DiGraph[int]) -> bool:
    """Return whether the graph's first edge has a weight."""
    for _, _, data in graph.edges(data=True):
        return "weight" in data
    return False


def check_digraph(graph: Any) -> nx.DiGraph[int]:
    """Check that ``graph`` is a directed graph on the ranks 0..n-1, and return it.

    Raises:
        TopologyError: If it is not; the message says how to convert it.
    """
    import networkx as nx

    check_is_graph(graph)
    if graph.is_multigraph():
        raise TopologyError(
            f"{graph_name(graph)} has parallel edges; expected a networkx.DiGraph: "
            "nx.DiGraph(graph) keeps one edge of each kind"
        )
    if not isinstance(graph, nx.DiGraph):
        raise TopologyError(
            f"{graph_name(graph)} is undirected; expected a networkx.DiGraph: use "
            "topology.metropolis_weights(graph) or graph.to_directed()"
        )
    n = graph.number_of_nodes()
    if n == 0:
        raise TopologyError("the graph has no ranks; expected the nodes 0..n-1 with n >= 1")
    strangers = [node for node in range(n) if node not in graph]
    if strangers:
        raise TopologyError(
            f"{graph_name(graph)} has {n} nodes but not node {strangers[0]}; expected the ranks "
            f"0..{n - 1}: use networkx.convert_node_labels_to_integers(graph)"
        )
    digraph: nx.DiGraph[int] = graph
    return digraph


def _weight_sums(graph: nx.DiGraph[int]) -> tuple[list[float], list[float]]:
    """Return the row and column sums of the mixing matrix; raise an error for invalid weights."""
    n = graph.number_of_nodes()
    rows, columns = [0.0] * n, [0.0] * n
    for source, target, data in graph.edges(data=True):
        try:
            weight = float(data["weight"])
        except KeyError:
            raise TopologyError(
                f"{graph_name(graph)} has weights, but none on edge {source} -> {target}; give "
                "every edge a weight or none, self-loops included"
            ) from None
        except (TypeError, ValueError):
            weight = math.nan
        if not math.isfinite(weight):
            raise TopologyError(
                f"{graph_name(graph)} has weight {data['weight']!r} on edge {source} -> {target}; "
                "expected a finite number"
            )
        rows[target] += weight
        columns[source] += weight
    return rows, columns


def _farthest(sums: list[float]) -> tuple[int, float]:
    """Return the index of the sum farthest from one, and its distance from one."""
    worst = max(range(len(sums)), key=lambda i: abs(sums[i] - 1.0))
    return worst, abs(sums[worst] - 1.0)


def check_graph(graph: Any, n: int | None = None, *, connected: bool = False) -> None:
    """Check a user's graph: nodes, weights and their sums, optionally connectivity.

    A graph without any weights passes: uniform ones will be used.

    Args:
        graph: What should be an ``nx.DiGraph`` on the ranks 0..n-1 with ``weight`` on its edges.
        n: The number of ranks that it must have, if known.
        connected: Whether every rank must reach every other one. (A single round of a schedule
            need not be connected.)

    Raises:
        TopologyError: If the nodes are not 0..n-1, a weight is missing or not finite, neither all
            rows (what a rank receives) nor all columns (what it gives) of the mixing matrix sum
            to one, or the graph is not connected though it must be.

    Example:
        >>> import networkx as nx
        >>> graph = nx.DiGraph()
        >>> graph.add_weighted_edges_from([(0, 0, 0.5), (1, 0, 0.5), (1, 1, 0.5), (0, 1, 0.6)])
        >>> check_graph(graph)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        asyncddp.topology.errors.TopologyError: the weights of a graph on 2 ranks do not sum to one:
        rank 1 receives 1.1 in all and rank 0 gives 1.1 in all; use topology.uniform_weights(graph)
        (rows sum to one), push_weights(graph) (columns) or metropolis_weights(graph) (both)
    """
    graph = check_digraph(graph)
    size = graph.number_of_nodes()
    if n is not None and size != n:
        raise TopologyError(
            f"{graph_name(graph)} has {size} ranks, expected {n}; build it for n={n}"
        )
    if is_weighted(graph) or any("weight" in data for _, _, data in graph.edges(data=True)):
        rows, columns = _weight_sums(graph)
        (i, off_row), (j, off_column) = _farthest(rows), _farthest(columns)
        if off_row > TOLERANCE and off_column > TOLERANCE:
            raise TopologyError(
                f"the weights of {graph_name(graph)} do not sum to one: rank {i} receives "
                f"{rows[i]:.12g} in all and rank {j} gives {columns[j]:.12g} in all; use "
                "topology.uniform_weights(graph) (rows sum to one), push_weights(graph) (columns) "
                "or metropolis_weights(graph) (both)"
            )
    if not connected:
        return
    import networkx as nx

    if not nx.is_strongly_connected(graph):
        raise TopologyError(_disconnected(graph))


def _disconnected(graph: nx.DiGraph[int]) -> str:
    """Format an error message that names two ranks which do not reach each other."""
    import networkx as nx

    parts = sorted(map(sorted, nx.strongly_connected_components(graph)))
    first, second = parts[0][0], parts[1][0]
    near = sorted({first, second})
    return (
        f"{graph_name(graph)} is not connected: it falls into {len(parts)} parts, and ranks "
        f"{near[0]} and {near[1]} do not both reach each other; add edges between the parts, such "
        f"as {near[0]} -> {near[1]} and {near[1]} -> {near[0]}"
    )
