"""Graphs that say who averages with whom, and schedules that change them from round to round.

One convention: ``W[i, j]`` is the weight that rank i gives to the value of rank j. In the graph it
is the edge ``j -> i``: ``graph[j][i]["weight"] == W[i, j]``. Every graph has the ranks 0..n-1,
self-loops, and a float64 ``weight`` on every edge.

This package needs networkx and numpy alone; neither MPI nor torch.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from topology.checks import check_graph
from topology.consensus import consensus_error, finite_time_length
from topology.cost import CommunicationCost, Cost, communication_cost
from topology.draw import draw
from topology.errors import TopologyError
from topology.graphs import (
    GRAPHS,
    complete,
    equi_static,
    exponential,
    exponential_two,
    grid_2d,
    hypercube,
    random_regular,
    ring,
    star,
    symmetric_exponential,
    torus_2d,
)
from topology.matrices import mixing_matrix
from topology.neighbors import Neighbors, neighbors_of
from topology.schedule import GraphOrSchedule, Schedule, as_schedule, describe
from topology.schedules import (
    SCHEDULES,
    alternating_exponential_ring,
    base_k,
    equi_dynamic,
    inner_outer_exponential,
    inner_outer_ring,
    matcha,
    one_peer_exponential,
    one_peer_hypercube,
    one_peer_of,
    simple_base_k,
)
from topology.spectral import consensus_rate, min_eigenvalue, spectral_gap
from topology.stochasticity import (
    is_column_stochastic,
    is_doubly_stochastic,
    is_row_stochastic,
    is_symmetric,
)
from topology.weights import from_adjacency, metropolis_weights, push_weights, uniform_weights

__all__ = [
    "GRAPHS",
    "SCHEDULES",
    "CommunicationCost",
    "Cost",
    "GraphOrSchedule",
    "Neighbors",
    "Schedule",
    "TopologyError",
    "alternating_exponential_ring",
    "as_schedule",
    "base_k",
    "check_graph",
    "communication_cost",
    "complete",
    "consensus_error",
    "consensus_rate",
    "describe",
    "draw",
    "equi_dynamic",
    "equi_static",
    "exponential",
    "exponential_two",
    "finite_time_length",
    "from_adjacency",
    "grid_2d",
    "hypercube",
    "inner_outer_exponential",
    "inner_outer_ring",
    "is_column_stochastic",
    "is_doubly_stochastic",
    "is_row_stochastic",
    "is_symmetric",
    "matcha",
    "metropolis_weights",
    "min_eigenvalue",
    "mixing_matrix",
    "neighbors_of",
    "one_peer_exponential",
    "one_peer_hypercube",
    "one_peer_of",
    "push_weights",
    "random_regular",
    "ring",
    "simple_base_k",
    "spectral_gap",
    "star",
    "symmetric_exponential",
    "torus_2d",
    "uniform_weights",
]

if not TYPE_CHECKING:  # else a type checker would let every name pass

    def __getattr__(name: str) -> object:
        """Name the nearest where there is no such name, also to those who write RingGraph.

        Raises:
            AttributeError: Always.
        """
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removesuffix("_graph")
        near = [] if name.startswith("_") else difflib.get_close_matches(snake, __all__, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
