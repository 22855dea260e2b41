"""Graphs that say who averages with whom, and schedules that change them from round to round.

One convention: ``W[i, j]`` is the weight that rank i gives to the value of rank j. In the graph it
is the edge ``j -> i``: ``graph[j][i]["weight"] == W[i, j]``. Every graph has the ranks 0..n-1,
self-loops, and a float64 ``weight`` on every edge.

Each graph and schedule is one line of imports below.

This package needs networkx and numpy alone; neither MPI nor torch.
"""

import difflib as _difflib
import re as _re
import types as _types
import typing as _typing
from collections.abc import Callable as _Callable

import networkx as _nx

from topology.checks import check_graph as check_graph
from topology.consensus import consensus_error as consensus_error
from topology.consensus import finite_time_length as finite_time_length
from topology.cost import CommunicationCost as CommunicationCost
from topology.cost import Cost as Cost
from topology.cost import communication_cost as communication_cost
from topology.draw import draw as draw
from topology.errors import TopologyError as TopologyError
from topology.graphs.complete import complete as complete
from topology.graphs.equi_static import equi_static as equi_static
from topology.graphs.exponential import exponential as exponential
from topology.graphs.exponential import exponential_two as exponential_two
from topology.graphs.exponential import symmetric_exponential as symmetric_exponential
from topology.graphs.grid import grid_2d as grid_2d
from topology.graphs.grid import torus_2d as torus_2d
from topology.graphs.hypercube import hypercube as hypercube
from topology.graphs.random_regular import random_regular as random_regular
from topology.graphs.ring import ring as ring
from topology.graphs.star import star as star
from topology.graphs.tree import tree as tree
from topology.links import Link as Link
from topology.links import Links as Links
from topology.matrices import mixing_matrix as mixing_matrix
from topology.neighbors import Neighbors as Neighbors
from topology.neighbors import neighbors_of as neighbors_of
from topology.pair_constants import pair_constants as pair_constants
from topology.schedule import GraphOrSchedule as GraphOrSchedule
from topology.schedule import Schedule as Schedule
from topology.schedule import as_schedule as as_schedule
from topology.schedule import describe as describe
from topology.schedules.alternating_exponential_ring import (
    alternating_exponential_ring as alternating_exponential_ring,
)
from topology.schedules.base_k import base_k as base_k
from topology.schedules.base_k import simple_base_k as simple_base_k
from topology.schedules.equi_dynamic import equi_dynamic as equi_dynamic
from topology.schedules.inner_outer import inner_outer_exponential as inner_outer_exponential
from topology.schedules.inner_outer import inner_outer_ring as inner_outer_ring
from topology.schedules.matcha import matcha as matcha
from topology.schedules.matching_decomposition import (
    matching_decomposition as matching_decomposition,
)
from topology.schedules.one_peer_exponential import one_peer_exponential as one_peer_exponential
from topology.schedules.one_peer_hypercube import one_peer_hypercube as one_peer_hypercube
from topology.schedules.one_peer_of import one_peer_of as one_peer_of
from topology.schedules.random_matching import random_matching as random_matching
from topology.schedules.shift_one import shift_one as shift_one
from topology.spectral import consensus_rate as consensus_rate
from topology.spectral import min_eigenvalue as min_eigenvalue
from topology.spectral import spectral_gap as spectral_gap
from topology.stochasticity import is_column_stochastic as is_column_stochastic
from topology.stochasticity import is_doubly_stochastic as is_doubly_stochastic
from topology.stochasticity import is_row_stochastic as is_row_stochastic
from topology.stochasticity import is_symmetric as is_symmetric
from topology.weights import from_adjacency as from_adjacency
from topology.weights import lazy_weights as lazy_weights
from topology.weights import metropolis_weights as metropolis_weights
from topology.weights import push_weights as push_weights
from topology.weights import uniform_weights as uniform_weights


def _defined_in(package: str) -> dict[str, _typing.Any]:
    """Return the public functions of a package that are imported here, by name."""
    return {
        name: value
        for name, value in sorted(globals().items())
        if getattr(value, "__module__", "").startswith(package)
    }


GRAPHS: "dict[str, _Callable[..., _nx.DiGraph[int]]]" = _defined_in("topology.graphs.")
"""Functions that make a graph for n ranks, by name."""
SCHEDULES: dict[str, _Callable[..., Schedule]] = _defined_in("topology.schedules.")
"""Functions that make a schedule of graphs for n ranks, by name."""

if not _typing.TYPE_CHECKING:  # type checkers take the lines above, and would let every name pass
    __all__ = sorted(
        name
        for name, value in globals().items()
        if not name.startswith("_") and not isinstance(value, _types.ModuleType)
    )

    def __getattr__(name: str) -> object:
        """Name the nearest where there is no such name, also to those who write RingGraph.

        Raises:
            AttributeError: Always.
        """
        snake = _re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removesuffix("_graph")
        near = [] if name.startswith("_") else _difflib.get_close_matches(snake, __all__, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
