"""BlueFog's graph constructors under their names, built by :mod:`topology`.

In all of them the edge i → j carries what j gives to the value of i, ``A[i, j]``, and self-loops
carry what a rank gives to its own.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np

import topology
from asyncddp.integrations.bluefog.error_translation import TopologyAssertionError, translate_errors
from asyncddp.integrations.bluefog.one_peer_schedules import (
    GetDynamicOnePeerSendRecvRanks,
    GetExp2DynamicSendRecvMachineRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
)
from asyncddp.integrations.bluefog.rank_inference import (
    InferDestinationFromSourceRanks,
    InferSourceFromDestinationRanks,
)

__all__ = [
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
    "isPowerOf",
]

Graph = nx.DiGraph  # generic in the stubs alone


@translate_errors()
def ExponentialTwoGraph(size: int) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Rank i sends to i + 1, i + 2, i + 4, …; see :func:`topology.exponential_two`."""
    return _even(topology.exponential_two(size))


@translate_errors()
def ExponentialGraph(size: int, base: int = 2) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Rank i sends to i + 1, i + base, i + base², …; see :func:`topology.exponential`."""
    return _even(topology.exponential(size, base))


@translate_errors()
def SymmetricExponentialGraph(size: int, base: int = 4) -> Graph[int]:  # noqa: N802
    """Exponential graph in both directions, up to distance size / 2."""
    return _even(topology.symmetric_exponential(size, base))


@translate_errors()
def RingGraph(size: int, connect_style: int = 0) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """A ring: to both neighbours (0), to i - 1 (1) or to i + 1 (2); see :func:`topology.ring`.

    Raises:
        TopologyAssertionError: There is no such style.
    """
    styles = {0: "both", 1: "left", 2: "right"}
    if connect_style not in styles:
        raise TopologyAssertionError(
            f"RingGraph: argument connect_style: expected 0, 1 or 2, got {connect_style!r}"
        )
    return _even(topology.ring(size, styles[connect_style]))


@translate_errors()
def StarGraph(size: int, center_rank: int = 0) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """One rank exchanges with all others; see :func:`topology.star`."""
    graph = topology.star(size, center_rank)
    graph[center_rank][center_rank]["weight"] = 1 / size
    return graph


@translate_errors()
def FullyConnectedGraph(size: int) -> Graph[int]:  # noqa: N802 - BlueFog's name
    """Every rank exchanges with every other one; see :func:`topology.complete`."""
    return _even(topology.complete(size))


@translate_errors()
def MeshGrid2DGraph(  # noqa: N802 - BlueFog's name
    size: int, shape: tuple[int, int] | None = None
) -> Graph[int]:
    """Rows and columns; see :func:`topology.grid_2d`.

    Raises:
        TopologyAssertionError: The shape does not have ``size`` places.
    """
    return topology.grid_2d(size, shape)


def _even(graph: Graph[int]) -> Graph[int]:
    """Let ranks give themselves the very float that they give to each other, where all are equal.

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
    """Return True if x is 1, base, base², …, in whole numbers.

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
