"""Weights of any graph: which sums are one, and what is refused."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp import topology
from tests.topology.graph_cases import oracle


@st.composite
def digraphs(draw):
    """Directed graphs on 1..8 ranks, with or without self-loops, connected or not."""
    n = draw(st.integers(1, 8))
    pairs = [(i, j) for i in range(n) for j in range(n)]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(draw(st.lists(st.sampled_from(pairs), max_size=30)))
    return graph


def edges_between_ranks(graph):
    return {(i, j) for i, j in graph.edges() if i != j}


@given(digraphs())
def test_uniform_weights_have_rows_of_one_and_equal_entries(graph):
    """Each row sums to one with equal entries, and the edges between ranks stay."""
    result = topology.uniform_weights(graph)
    w = oracle(result)
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-15)
    for row in w:
        np.testing.assert_allclose(row[row > 0], 1 / (row > 0).sum(), atol=1e-15)
    assert edges_between_ranks(result) == edges_between_ranks(graph)
    assert topology.is_row_stochastic(result)


@given(digraphs())
def test_push_weights_have_columns_of_one_and_equal_entries(graph):
    """Each column sums to one with equal entries, and the edges between ranks stay."""
    result = topology.push_weights(graph)
    w = oracle(result)
    np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-15)
    for column in w.T:
        np.testing.assert_allclose(column[column > 0], 1 / (column > 0).sum(), atol=1e-15)
    assert edges_between_ranks(result) == edges_between_ranks(graph)
    assert topology.is_column_stochastic(result)


@given(digraphs())
def test_metropolis_weights_are_symmetric_doubly_stochastic_and_not_negative(graph):
    """Off the diagonal weights are 1/(1 + max degree); W = Wᵀ ≥ 0, and sums are one."""
    undirected = graph.to_undirected()
    result = topology.metropolis_weights(undirected)
    w = oracle(result)
    np.testing.assert_array_equal(w, w.T)
    np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-15)
    assert (w >= 0).all()
    degrees = [len(set(undirected[i]) - {i}) for i in range(len(graph))]
    for i, j in edges_between_ranks(result):
        assert w[i, j] == 1 / (1 + max(degrees[i], degrees[j]))
    both_ways = topology.metropolis_weights(undirected.to_directed())
    np.testing.assert_array_equal(oracle(both_ways), w)


@given(digraphs())
def test_float_matrix_goes_through_a_graph_unchanged(graph):
    """``mixing_matrix(from_adjacency(w))`` is ``w``, for row- and column-stochastic matrices."""
    w = oracle(topology.uniform_weights(graph))
    np.testing.assert_array_equal(topology.mixing_matrix(topology.from_adjacency(w)), w)
    np.testing.assert_array_equal(topology.mixing_matrix(topology.from_adjacency(w.T)), w.T)


@given(digraphs())
def test_boolean_and_integer_matrices_get_uniform_weights(graph):
    """A boolean or integer matrix is a pattern of edges, which get uniform weights."""
    w = oracle(topology.uniform_weights(graph))
    for pattern in (w > 0, (w > 0).astype(int), 3 * (w > 0).astype(np.uint8)):
        np.testing.assert_array_equal(oracle(topology.from_adjacency(pattern)), w)


def test_rows_of_a_matrix_receive():
    """W[0, 1] = 1: rank 0 receives from rank 1, so rank 1 sends."""
    graph = topology.from_adjacency([[0.0, 1.0], [0.0, 1.0]])
    assert topology.neighbors_of(graph, 0) == topology.Neighbors(0.0, {1: 1.0}, ())
    assert topology.neighbors_of(graph, 1) == topology.Neighbors(1.0, {}, (0,))
    assert graph[1][0]["weight"] == 1.0


def test_sparse_matrices_serve():
    """``from_adjacency`` takes scipy's sparse formats, and ``mixing_matrix`` can return one."""
    sparse = pytest.importorskip("scipy.sparse", reason="scipy's matrices need scipy")
    w = topology.mixing_matrix(topology.exponential_two(6))
    for matrix in (sparse.csr_array(w), sparse.coo_array(w).tocsc(), sparse.lil_matrix(w)):
        graph = topology.from_adjacency(matrix)
        np.testing.assert_array_equal(topology.mixing_matrix(graph), w)
    np.testing.assert_array_equal(topology.mixing_matrix(graph, sparse=True).toarray(), w)


def test_weights_keep_the_name_of_the_graph():
    """A graph weighted anew is described by the name of the original graph."""
    for weigh in (topology.uniform_weights, topology.push_weights, topology.metropolis_weights):
        assert topology.describe(weigh(topology.star(4))) == "star(4)"


def test_graph_without_weights_gets_uniform_ones_everywhere():
    """Without weights a graph has the uniform ones, in schedules as in ``mixing_matrix``."""
    bare = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    uniform = topology.uniform_weights(bare)
    schedule = topology.as_schedule(bare)
    for rank in range(3):
        expected = topology.neighbors_of(uniform, rank)
        assert schedule.neighbors(rank, 0) == expected
        assert topology.neighbors_of(bare, rank) == expected
    np.testing.assert_array_equal(topology.mixing_matrix(bare), oracle(uniform))


def test_missing_self_loop_of_a_weighted_graph_is_weight_zero():
    """A rank without self-loop in a weighted graph has self weight 0, also in the schedule."""
    swap = nx.DiGraph()
    swap.add_weighted_edges_from([(0, 1, 1.0), (1, 0, 1.0)])
    assert topology.neighbors_of(swap, 0) == topology.Neighbors(0.0, {1: 1.0}, (1,))
    graph = topology.as_schedule(swap).graph(0)
    assert graph[0][0]["weight"] == 0.0


def test_schedule_of_a_graph_does_not_follow_later_changes():
    """Removing an edge after ``as_schedule`` leaves the schedule's neighbours as they were."""
    graph = topology.ring(4)
    schedule = topology.as_schedule(graph)
    graph.remove_edge(1, 0)
    assert schedule.neighbors(0, 0).src_weights.keys() == {1, 3}


def test_numpy_ranks_and_weights_become_plain_numbers():
    """A ``Neighbors`` record holds Python's int and float, also where the graph has numpy's."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(
        (np.int64(i), np.int64(j), np.float64(0.5)) for i in range(2) for j in range(2)
    )
    near = topology.neighbors_of(graph, np.int64(0))
    assert [type(x) for x in (near.self_weight, *near.src_weights, *near.dst_ranks)] == [
        float,
        int,
        int,
    ]
    assert type(near.src_weights[1]) is float


def test_neighbors_record_is_frozen_and_slotted():
    """A ``Neighbors`` record refuses assignment and has no ``__dict__``."""
    near = topology.neighbors_of(topology.ring(3), 0)
    with pytest.raises(AttributeError):
        near.self_weight = 1.0
    assert not hasattr(near, "__dict__")


@pytest.mark.parametrize("n", [2, 3, 4, 6, 9])
def test_lazy_weights_are_half_of_w_and_half_of_the_identity(n):
    """(I + W) / 2, whose eigenvalues are not negative where W is symmetric."""
    ring = topology.ring(n)
    lazy = topology.lazy_weights(ring)
    w = (np.eye(n) + topology.mixing_matrix(ring)) / 2
    np.testing.assert_allclose(topology.mixing_matrix(lazy), w, atol=1e-16)
    assert topology.min_eigenvalue(lazy) >= -1e-12
    assert topology.describe(lazy) == f"lazy_weights(ring({n}))"
    bare = nx.DiGraph([(0, 1), (1, 0)])
    np.testing.assert_allclose(
        topology.mixing_matrix(topology.lazy_weights(bare)), [[0.75, 0.25], [0.25, 0.75]]
    )
