"""Wrong arguments say what is wrong and what comes nearest and works."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest

from asyncddp import topology
from asyncddp.topology import TopologyError


def weighted(*edges: tuple[object, object, object]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(edges)
    return graph


RING = topology.ring(8)
MESSAGES = {
    "hypercube needs n to be a power of two, got n=12; nearest: 8, 16, or use base_k(12, 1), which "
    "is exact for every n": lambda: topology.hypercube(12),
    "one_peer_hypercube needs n to be a power of two, got n=3; nearest: 2, 4, or use base_k": (
        lambda: topology.one_peer_hypercube(3)
    ),
    "shift_one needs an even n, since each rank has a partner in every round, got n=5; nearest: 4, "
    "6, or use one_peer_exponential(5) or base_k(5, 1)": lambda: topology.shift_one(5),
    "ring needs n >= 1, got n=0; nearest: n=1": lambda: topology.ring(0),
    "base_k needs an integer n >= 1, got n=2.5": lambda: topology.base_k(2.5, 1),
    "base_k needs k >= 1, got k=0; nearest: k=1": lambda: topology.base_k(5, 0),
    "simple_base_k needs k >= 1": lambda: topology.simple_base_k(5, -1),
    "ring needs style to be one of 'both', 'left', 'right', got style='up'": (
        lambda: topology.ring(4, "up")
    ),
    "star needs center in 0..3, got center=4; nearest: center=3": lambda: topology.star(4, 4),
    "grid_2d needs shape=(rows, columns) with rows * columns = n = 12, got shape=(5, 2); nearest: "
    "shape=(3, 4), or leave it out": lambda: topology.grid_2d(12, (5, 2)),
    "torus_2d needs shape=(rows, columns) with rows * columns = n = 7, got shape=7; nearest: "
    "shape=(1, 7)": lambda: topology.torus_2d(7, 7),
    "got shape=(-3, -4)": lambda: topology.grid_2d(12, (-3, -4)),
    "exponential needs base >= 2, got base=1; nearest: base=2": lambda: topology.exponential(8, 1),
    "symmetric_exponential needs base >= 2": lambda: topology.symmetric_exponential(8, 0),
    "random_regular(n=7, degree=3) has an odd sum of degrees, 21, which no graph has; nearest: "
    "degree=2": lambda: topology.random_regular(7, 3, 0),
    "random_regular(n=4, degree=4) needs a degree in 1..3; nearest: degree=3": (
        lambda: topology.random_regular(4, 4, 0)
    ),
    "random_regular(n=6, degree=1) falls apart into pairs and is not connected; nearest: "
    "degree=2": lambda: topology.random_regular(6, 1, 0),
    "random_regular needs seed >= 0, got seed=-1; nearest: seed=0": (
        lambda: topology.random_regular(6, 2, -1)
    ),
    "equi_static undirected uses each shift both ways and needs an even degree, got degree=3; "
    "nearest: degree=4, or directed=True": (lambda: topology.equi_static(8, 3, directed=False)),
    "is not connected: its shifts [2] and n have a common divisor; use seed=": (
        lambda: [topology.equi_static(4, 1, seed) for seed in range(20)]
    ),
    "equi_dynamic needs eta in (0, 1], got eta=0; eta=0.5 mixes fastest": (
        lambda: topology.equi_dynamic(8, 0, eta=0)
    ),
    "inner_outer_ring needs a local_size >= 3 that divides n, got n=8, local_size=2; nearest: "
    "local_size=4, or use one_peer_exponential(8)": lambda: topology.inner_outer_ring(8, 2),
    "inner_outer_exponential needs a local_size >= 3 that divides n, got n=4, local_size=3; "
    "nearest: local_size=4": lambda: topology.inner_outer_exponential(4, 3),
    "got n=2, local_size=1; use one_peer_exponential(2)": (
        lambda: topology.inner_outer_exponential(2, 1)
    ),
    "alternating_exponential_ring needs a local_size that divides n, got n=8, local_size=3; "
    "nearest: local_size=2": lambda: topology.alternating_exponential_ring(8, 3),
    "alternating_exponential_ring needs n / local_size to be a power of two, got n / local_size=3; "
    "nearest: 2, 4, or use base_k(3, 1) between machines": (
        lambda: topology.alternating_exponential_ring(6, 2)
    ),
    "matcha needs a budget in (0, 1], the part of all matchings that is used on average, got "
    "budget=1.5; budget=0.5 halves": lambda: topology.matcha(RING, 1.5, 0),
    "matcha needs seed >= 0": lambda: topology.matcha(RING, 0.5, -3),
    "matcha needs a graph with both directions of every edge, but ring(8, 'left') has 0 -> 7 only; "
    "use graph.to_undirected(), or one_peer_of(graph)": (
        lambda: topology.matcha(topology.ring(8, "left"), 0.5, 0)
    ),
    "matcha decomposes dense matrices and takes up to n=1024 ranks, got n=1025": (
        lambda: topology.matcha(topology.ring(1025), 0.5, 0)
    ),
    "a graph on 4 ranks is not connected: it falls into 2 parts, and ranks 0 and 2 do not both "
    "reach each other; add edges between the parts, such as 0 -> 2 and 2 -> 0": (
        lambda: topology.matcha(nx.Graph([(0, 1), (2, 3)]), 0.5, 0)
    ),
    "a graph on 3 ranks is not connected: it falls into 3 parts": (
        lambda: topology.one_peer_of(nx.DiGraph([(0, 1), (1, 2)]))
    ),
    "metropolis_weights needs both directions of every edge, but a graph on 2 ranks has 0 -> 1 "
    "only; use graph.to_undirected(), or push_weights(graph)": (
        lambda: topology.metropolis_weights(nx.DiGraph([(0, 1)]))
    ),
    "from_adjacency needs a square matrix (n, n) with n >= 1, got shape (2, 3)": (
        lambda: topology.from_adjacency(np.zeros((2, 3)))
    ),
    "with n >= 1, got shape (0, 0)": lambda: topology.from_adjacency(np.zeros((0, 0))),
    "needs a boolean, integer or float matrix, got dtype complex128": (
        lambda: topology.from_adjacency(np.eye(2) * 1j)
    ),
    "the weights of a graph on 2 ranks do not sum to one: rank 1 receives 1.2 in all": (
        lambda: topology.from_adjacency([[0.5, 0.5], [0.4, 0.8]])
    ),
    "expected a networkx.DiGraph or a topology.Schedule, got str; build one with topology.ring": (
        lambda: topology.as_schedule("ring")
    ),
    "got int; build": lambda: topology.consensus_rate(4),
    "got NoneType": lambda: topology.describe(None),
    "a graph on 4 ranks is undirected; expected a networkx.DiGraph: use "
    "topology.metropolis_weights(graph)": lambda: topology.as_schedule(nx.cycle_graph(4)),
    "has parallel edges; expected a networkx.DiGraph: nx.DiGraph(graph)": (
        lambda: topology.check_graph(nx.MultiDiGraph([(0, 1)]))
    ),
    "the graph has no ranks": lambda: topology.check_graph(nx.DiGraph()),
    "a graph on 2 ranks has 2 nodes but not node 0; expected the ranks 0..1: use "
    "networkx.convert_node_labels_to_integers(graph)": (
        lambda: topology.check_graph(nx.DiGraph([("a", "b")]))
    ),
    "ring(8) has 8 ranks, expected 4; build it for n=4": lambda: topology.check_graph(RING, 4),
    "has weights, but none on edge 1 -> 1; give every edge a weight or none": (
        lambda: topology.check_graph(nx.DiGraph([(0, 0, {"weight": 1.0}), (1, 1)]))
    ),
    "has weights, but none on edge 0 -> 0": (
        lambda: topology.check_graph(nx.DiGraph([(0, 0), (1, 1, {"weight": 1.0})]))
    ),
    "has weight nan on edge 0 -> 0; expected a finite number": (
        lambda: topology.check_graph(weighted((0, 0, math.nan)))
    ),
    "has weight 'much' on edge 0 -> 0": lambda: topology.check_graph(weighted((0, 0, "much"))),
    "has weight None on edge 0 -> 0": lambda: topology.check_graph(weighted((0, 0, None))),
    "neighbors_of needs rank in 0..7, got rank=8; nearest: rank=7": (
        lambda: topology.neighbors_of(RING, 8)
    ),
    "ring(8) needs rank in 0..7, got rank=-1; nearest: rank=0": (
        lambda: topology.as_schedule(RING).neighbors(-1, 0)
    ),
    "one_peer_exponential(8) needs k >= 0, got k=-1": (
        lambda: topology.one_peer_exponential(8).neighbors(0, -1)
    ),
    "mine needs period >= 1, got period=0": lambda: topology.Schedule("mine", 2, 0, None),
    "mine needs n >= 1, got n=0": lambda: topology.Schedule("mine", 0, 1, None),
    "consensus_error needs x0 of shape (8,) or (8, d) for ring(8), got (7,)": (
        lambda: topology.consensus_error(RING, 3, np.zeros(7))
    ),
    "consensus_error needs an x0 in which ranks differ": (
        lambda: topology.consensus_error(RING, 3, np.ones(8))
    ),
    "consensus_error needs finite numbers in x0": (
        lambda: topology.consensus_error(RING, 3, np.full(8, math.inf))
    ),
    "consensus_error needs steps >= 0, got steps=-1": lambda: topology.consensus_error(RING, -1),
    "finite_time_length needs max_rounds >= 1": lambda: topology.finite_time_length(RING, 0),
    "draw needs rounds >= 1, got rounds=0": (
        lambda: topology.draw(topology.one_peer_exponential(4), rounds=0)
    ),
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_message_names_argument_expected_got_and_remedy(message):
    """Each wrong call raises ``TopologyError`` with what was expected, got, and what works."""
    with pytest.raises(TopologyError) as caught:
        MESSAGES[message]()
    assert message in str(caught.value)


def test_topology_error_is_a_value_error():
    """``except ValueError`` catches a ``TopologyError``."""
    assert issubclass(TopologyError, ValueError)


@pytest.mark.parametrize(
    "graph",
    [
        topology.ring(5),
        topology.push_weights(topology.star(5)),
        topology.uniform_weights(topology.star(5)),
        nx.DiGraph([(0, 1)]),
        topology.from_adjacency([[1.5, -0.5], [-0.5, 1.5]]),
        topology.from_adjacency(np.eye(3)),
    ],
)
def test_sound_graphs_pass(graph):
    """``check_graph`` accepts graphs that have no weights, negative ones, or several parts."""
    topology.check_graph(graph)
    topology.check_graph(graph, len(graph))


def test_nearest_thing_that_works_does_work():
    """The remedies of the messages above are calls that succeed."""
    topology.base_k(12, 1), topology.hypercube(8), topology.hypercube(16)
    topology.random_regular(7, 2, 0), topology.random_regular(4, 3, 0)
    topology.inner_outer_ring(8, 4), topology.alternating_exponential_ring(8, 2)
    topology.grid_2d(12, (3, 4)), topology.equi_static(8, 4, directed=False)
    topology.as_schedule(topology.metropolis_weights(nx.cycle_graph(4)))
    topology.as_schedule(nx.DiGraph(nx.MultiDiGraph([(0, 1)])))
    lettered = nx.DiGraph([("a", "b"), ("b", "a")])
    topology.check_graph(nx.convert_node_labels_to_integers(lettered))
