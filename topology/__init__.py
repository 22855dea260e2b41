"""Graphs that say who averages with whom, and schedules that change them from round to round.

One convention: ``W[i, j]`` is the weight that rank i gives to the value of rank j. In the graph it
is the edge ``j -> i``: ``graph[j][i]["weight"] == W[i, j]``. Every graph has the ranks 0..n-1,
self-loops, and a float64 ``weight`` on every edge.

This package needs networkx and numpy alone; neither MPI nor torch.
"""

from __future__ import annotations

from topology.checks import check_graph
from topology.errors import TopologyError
from topology.graphs import GRAPHS, exponential, exponential_two, ring, symmetric_exponential
from topology.neighbors import Neighbors, neighbors_of
from topology.schedule import GraphOrSchedule, Schedule, as_schedule, describe
from topology.schedules import SCHEDULES, one_peer_exponential
from topology.weights import from_adjacency, metropolis_weights, push_weights, uniform_weights

__all__ = [
    "GRAPHS",
    "SCHEDULES",
    "GraphOrSchedule",
    "Neighbors",
    "Schedule",
    "TopologyError",
    "as_schedule",
    "check_graph",
    "describe",
    "exponential",
    "exponential_two",
    "from_adjacency",
    "metropolis_weights",
    "neighbors_of",
    "one_peer_exponential",
    "push_weights",
    "ring",
    "symmetric_exponential",
    "uniform_weights",
]
