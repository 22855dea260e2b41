"""BlueFog's function names for the graphs and one-peer schedules of :mod:`asyncddp.topology`.

The edge i → j carries the weight ``A[i, j]`` that j gives to the value of i, also for i = j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx
import numpy as np

from asyncddp import topology
from asyncddp.context.ranks_and_topology import rank as own_rank
from asyncddp.context.ranks_and_topology import size
from asyncddp.integrations.bluefog.bluefog_state import active_state
from asyncddp.integrations.bluefog.error_translation import (
    TopologyAssertionError,
    translate_errors_of,
)
from asyncddp.ops.object_collectives import gather_records

__all__ = [
    "ExponentialGraph", "ExponentialTwoGraph", "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks", "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks", "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights", "GetSendWeights", "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks", "IsRegularGraph", "IsTopologyEquivalent", "MeshGrid2DGraph",
    "RingGraph", "StarGraph", "SymmetricExponentialGraph", "isPowerOf",
]  # fmt: skip

Graph = nx.DiGraph  # generic in the stubs alone
SendRecv = Iterator[tuple[list[int], list[int]]]
"""A rank's ``(send_ranks, recv_ranks)``, step by step."""
Inferred = list[int] | tuple[list[int], Any]


def ExponentialTwoGraph(size: int) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Build a graph with edges i → i + 1, i + 2, i + 4, …: :func:`.topology.exponential_two`."""
    return _even(topology.exponential_two(size))


def ExponentialGraph(size: int, base: int = 2) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Build a graph with edges i → i + 1, i + base, i + base², …: :func:`.topology.exponential`."""
    return _even(topology.exponential(size, base))


def SymmetricExponentialGraph(size: int, base: int = 4) -> Graph[int]:  # noqa: N802
    """Build an exponential graph in both directions, up to distance size / 2."""
    return _even(topology.symmetric_exponential(size, base))


def RingGraph(size: int, connect_style: int = 0) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Build a ring: edges to i ± 1 (style 0), to i - 1 (1) or to i + 1 (2)."""
    styles = {0: "both", 1: "left", 2: "right"}
    if connect_style not in styles:
        raise TopologyAssertionError(
            f"RingGraph: argument connect_style: expected 0, 1 or 2, got {connect_style!r}"
        )
    return _even(topology.ring(size, styles[connect_style]))


def StarGraph(size: int, center_rank: int = 0) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Build a star: one rank exchanges with all others; see :func:`.topology.star`."""
    graph = topology.star(size, center_rank)
    graph[center_rank][center_rank]["weight"] = 1 / size
    return graph


def FullyConnectedGraph(size: int) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Build the complete graph, with edges between all ranks; see :func:`.topology.complete`."""
    return _even(topology.complete(size))


def MeshGrid2DGraph(  # noqa: N802 - BlueFog's name
    size: int, shape: tuple[int, int] | None = None
) -> Graph[int]:
    """Build a two-dimensional grid of ranks; see :func:`.topology.grid_2d`."""
    return topology.grid_2d(size, shape)


def _even(graph: Graph[int]) -> Graph[int]:
    """Set each self-loop's weight to exactly the weight of the rank's other edges.

    Ours is 1 minus the others, so that rows sum to 1 exactly; over there it is the same fraction.
    """
    for i in graph:
        others = [data["weight"] for _, j, data in graph.edges(i, data=True) if j != i]
        graph[i][i]["weight"] = others[0] if others else 1.0
    return graph


def GetRecvWeights(topo: Graph[int], rank: int) -> tuple[float, dict[int, float]]:  # noqa: N802
    """Return the weights that a rank gives to its own value and to its in-neighbours'.

    Example:
        >>> GetRecvWeights(StarGraph(4), 1)
        (0.75, {0: 0.25})
    """
    return _weights(topo, rank, topo.pred[rank])


def GetSendWeights(topo: Graph[int], rank: int) -> tuple[float, dict[int, float]]:  # noqa: N802
    """Return a rank's own weight, and the weights that its out-neighbours give to its value."""
    return _weights(topo, rank, topo.succ[rank])


def _weights(topo: Graph[int], rank: int, edges: Any) -> tuple[float, dict[int, float]]:
    own = float(topo[rank][rank].get("weight", 1.0)) if topo.has_edge(rank, rank) else 0.0
    return own, {j: float(edges[j].get("weight", 1.0)) for j in sorted(edges) if j != rank}


def IsTopologyEquivalent(  # noqa: N802 - BlueFog's name
    topo1: Graph[int] | None, topo2: Graph[int] | None
) -> bool:
    """Return True if two graphs have equal edges and weights, up to rounding."""
    if topo1 is None or topo2 is None:
        return False
    if set(topo1) != set(topo2) or topo1.number_of_edges() != topo2.number_of_edges():
        return False
    one, other = (nx.to_numpy_array(topo, nodelist=sorted(topo1)) for topo in (topo1, topo2))
    return bool(np.allclose(one, other, rtol=0.0, atol=1e-12))


def IsRegularGraph(topo: Graph[int]) -> bool:  # noqa: N802 - BlueFog's name
    """Return True if all ranks have equally many edges, in and out together."""
    return len({degree for _, degree in topo.degree()}) <= 1


def isPowerOf(x: int, base: int) -> bool:  # noqa: N802 - BlueFog's name
    """Return True if x is a power of the base (1, base, base², …).

    Raises:
        TopologyAssertionError: x is below 1, or the base is no whole number above 1.

    Example:
        >>> isPowerOf(3**5, 3), isPowerOf(12, 3)
        (True, False)
    """
    if not isinstance(base, int) or base < 2:
        raise TopologyAssertionError(
            f"isPowerOf: argument base: expected a whole number of at least 2, got {base!r}"
        )
    if x < 1:
        raise TopologyAssertionError(f"isPowerOf: argument x: expected at least 1, got {x!r}")
    while x % base == 0:
        x //= base
    return x == 1


def GetDynamicOnePeerSendRecvRanks(  # noqa: N802 - BlueFog's name
    topo: Graph[int], self_rank: int
) -> SendRecv:
    """Yield one out-neighbour per step, in clockwise order; see :func:`.topology.one_peer_of`.

    Example:
        >>> turns = GetDynamicOnePeerSendRecvRanks(topology.exponential_two(4), self_rank=0)
        >>> [next(turns) for _ in range(3)]
        [([1], [3]), ([2], [2]), ([1], [3])]
    """
    return _ranks(topology.one_peer_of(topo), self_rank)


def GetExp2DynamicSendRecvMachineRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> SendRecv:
    """Yield machine numbers: machine m sends to machine m + 1, m + 2, m + 4, … in turn.

    Raises:
        TopologyAssertionError: Only one machine, or machines without ``local_size`` ranks each.
    """
    if self_rank % local_size != local_rank or world_size % local_size or world_size <= local_size:
        raise TopologyAssertionError(
            "GetExp2DynamicSendRecvMachineRanks: expected two machines or more with local_size "
            f"ranks each, and local_rank = self_rank % local_size; got {world_size} ranks, "
            f"{local_size} on each machine, rank {self_rank} as its rank {local_rank}"
        )
    machines = topology.one_peer_exponential(world_size // local_size)
    return _ranks(machines, self_rank // local_size)


def GetInnerOuterRingDynamicSendRecvRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int
) -> SendRecv:
    """Yield a rank's peers along inner and outer rings; see :func:`.topology.inner_outer_ring`.

    Raises:
        TopologyAssertionError: ``local_size`` is below 3, or does not divide ``world_size``.
    """
    return _ranks(topology.inner_outer_ring(world_size, local_size), self_rank)


def GetInnerOuterExpo2DynamicSendRecvRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int
) -> SendRecv:
    """Yield inner and outer peers 1, 2, 4, … away; :func:`.topology.inner_outer_exponential`.

    Raises:
        TopologyAssertionError: ``local_size`` is below 3, or does not divide ``world_size``.
    """
    return _ranks(topology.inner_outer_exponential(world_size, local_size), self_rank)


def _ranks(schedule: topology.Schedule, rank: int) -> SendRecv:
    return ((list(near.dst_ranks), list(near.src_weights)) for near in schedule.iterate(rank))


def InferSourceFromDestinationRanks(  # noqa: N802 - BlueFog's name
    dst_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Inferred:
    """Return the ranks that send to this rank, from those that it sends to; collective.

    With ``construct_adjacency_matrix`` return ``(sources, W)``, W being an (n, n) float64 array in
    which ``W[i, j]`` is 1 over the number of those who send to j, itself included, where i is one
    of them, and 0 elsewhere.

    Raises:
        TopologyAssertionError: Ranks that are none, come twice, or are this one.
    """
    return _inferred("dst_ranks", dst_ranks, construct_adjacency_matrix)


def InferDestinationFromSourceRanks(  # noqa: N802 - BlueFog's name
    src_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Inferred:
    """Return the ranks that receive from this rank, from those it receives from; collective.

    The rest is as in :func:`InferSourceFromDestinationRanks`.
    """
    return _inferred("src_ranks", src_ranks, construct_adjacency_matrix)


def _inferred(argument: str, ranks: Sequence[int], with_matrix: bool) -> Inferred:
    active_state()
    own, n = own_rank(), size()
    named = list(ranks)
    wrong = [r for r in named if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < n]
    if wrong or own in named or len(set(named)) < len(named):
        raise TopologyAssertionError(
            f"argument {argument}: expected ranks in 0..{n - 1} other than {own}, this rank "
            f"itself, each once, got {named}"
        )
    every = gather_records(named, list[int], f"infer from {argument}")
    found = [peer for peer in range(n) if own in every[peer]]
    if not with_matrix:
        return found
    matrix = np.eye(n)
    for peer, others in enumerate(every):
        matrix[peer, others] = 1.0
    if argument == "src_ranks":
        matrix = matrix.T
    return found, matrix / matrix.sum(axis=0)


translate_errors_of(globals(), __all__)
