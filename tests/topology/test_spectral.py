"""Figures of graphs against dense linear algebra, by whichever way they are computed."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncddp import topology
from asyncddp.topology import spectral
from tests.topology.graph_cases import label, oracle, product

GRAPHS = {
    "circulant": topology.exponential_two(11),
    "symmetric": topology.grid_2d(12),
    "random": topology.random_regular(20, 4, seed=1),
    "row-stochastic": topology.uniform_weights(topology.star(7)),
    "column-stochastic": topology.push_weights(topology.star(7)),
    "directed": topology.uniform_weights(nx.gnp_random_graph(15, 0.3, seed=2, directed=True)),
    "disconnected": topology.from_adjacency(np.eye(4)),
    "one rank": topology.ring(1),
    "two ranks": topology.ring(2),
}


def dense(graph):
    """Rate, gap and smallest eigenvalue by definition."""
    w = oracle(graph)
    values = np.linalg.eigvals(w)
    others = np.delete(values, np.argmin(abs(values - 1)))
    second = abs(others).max() if len(others) else 0.0
    return np.linalg.norm(w - 1 / len(w), 2), 1 - second, values.real.min()


def assert_figures_are_dense(graph, tolerance):
    rate, gap, low = dense(graph)
    assert topology.consensus_rate(graph) == pytest.approx(rate, abs=tolerance)
    assert topology.spectral_gap(graph) == pytest.approx(gap, abs=max(tolerance, 1e-7))
    assert topology.min_eigenvalue(graph) == pytest.approx(low, abs=tolerance)


@pytest.mark.parametrize("name", GRAPHS)
def test_figures_are_those_of_dense_linear_algebra(name):
    """Rate, gap and smallest eigenvalue of any kind of graph equal the dense ones."""
    assert_figures_are_dense(GRAPHS[name], 1e-12)


@pytest.mark.parametrize("name", sorted({*GRAPHS} - {"one rank", "two ranks", "disconnected"}))
def test_sparse_routines_give_the_same(name, monkeypatch):
    """By sparse routines the figures agree with the dense ones to 1e-8."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    monkeypatch.setattr(spectral, "DENSE", 1)
    monkeypatch.setattr(spectral, "KRYLOV", 6)
    assert_figures_are_dense(GRAPHS[name], 1e-8)


@pytest.mark.parametrize("graph", [topology.grid_2d(600), topology.torus_2d(700)])
def test_larger_graphs_by_sparse_routines_agree_with_dense(graph):
    """On graphs beyond the dense limit the figures agree with the dense ones to 1e-9."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    assert_figures_are_dense(graph, 1e-9)


def test_graph_too_slow_for_iterations_is_factorised():
    """A line of 3,001 ranks: the second eigenvalue is 1 - 4e-7, its closed form is known."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    n = 3001  # a prime
    line = topology.grid_2d(n)
    exact = 1 - 2 / 3 * (1 - np.cos(np.pi / n))
    assert topology.consensus_rate(line) == pytest.approx(exact, abs=1e-12)
    low = 1 - 2 / 3 * (1 - np.cos(np.pi * (n - 1) / n))
    assert topology.min_eigenvalue(line) == pytest.approx(low, abs=1e-9)


@pytest.mark.parametrize(
    "schedule",
    [
        topology.one_peer_exponential(12),
        topology.inner_outer_exponential(12, 4),
        topology.one_peer_of(topology.grid_2d(6)),
    ],
    ids=label,
)
def test_rate_of_a_schedule_is_the_mean_factor_of_its_period(schedule):
    """Rate and gap come from the t-th root of a period's product, t its length."""
    t = schedule.period
    deviation = product(schedule, t) - 1 / schedule.n
    rate = np.linalg.norm(deviation, 2) ** (1 / t)
    radius = abs(np.linalg.eigvals(deviation)).max() ** (1 / t)
    assert topology.consensus_rate(schedule) == pytest.approx(rate, abs=1e-9)
    assert topology.spectral_gap(schedule) == pytest.approx(1 - radius, abs=1e-6)
    low = min(np.linalg.eigvals(oracle(schedule.graph(k))).real.min() for k in range(t))
    assert topology.min_eigenvalue(schedule) == pytest.approx(low, abs=1e-9)


@pytest.mark.parametrize("schedule", [topology.base_k(13, 1), topology.one_peer_hypercube(16)])
def test_exact_schedules_have_rate_zero(schedule):
    """A schedule that is exact in finite time has rate 0 and gap 1, without rounding."""
    assert topology.consensus_rate(schedule) == 0.0
    assert topology.spectral_gap(schedule) == 1.0


def test_schedules_that_never_repeat_are_judged_by_sixteen_rounds():
    """Without a period the rate is the 16th root of the deviation after 16 rounds."""
    schedule = topology.equi_dynamic(8, seed=0)
    rate = np.linalg.norm(product(schedule, 16) - 1 / 8, 2) ** (1 / 16)
    assert topology.consensus_rate(schedule) == pytest.approx(rate)
    assert 0.3 < rate < 0.9


def test_nilpotent_graph_has_gap_one_though_not_exact_at_once():
    """The de Bruijn graph: all eigenvalues beside one are zero, its norm is not."""
    w = np.zeros((8, 8))
    for i in range(8):
        w[i, [2 * i % 8, (2 * i + 1) % 8]] = 0.5
    graph = topology.from_adjacency(w)
    assert topology.consensus_rate(graph) == pytest.approx(1.0)
    assert topology.spectral_gap(graph) == pytest.approx(1.0, abs=1e-3)
    assert topology.finite_time_length(graph) == 3


def test_stochasticity_is_judged_by_sums_in_every_round():
    """Sums of one and symmetry must hold in every round; negative weights do not matter."""
    assert topology.is_row_stochastic(topology.uniform_weights(topology.star(4)))
    assert not topology.is_column_stochastic(topology.uniform_weights(topology.star(4)))
    assert not topology.is_doubly_stochastic(topology.push_weights(topology.star(4)))

    def look_up(rank, k):
        if k == 0:
            return topology.Neighbors(0.5, {1 - rank: 0.5}, (1 - rank,))
        return topology.Neighbors(*((1.0, {}, (1,)) if rank == 0 else (0.5, {0: 0.5}, ())))

    assert not topology.is_doubly_stochastic(topology.Schedule("late", 2, 2, look_up))
    assert not topology.is_symmetric(topology.Schedule("late", 2, 2, look_up))
    negative = topology.matcha(topology.ring(8), 0.5, seed=0)
    assert min(negative.neighbors(0, k).self_weight for k in range(20)) < 0
    assert topology.is_doubly_stochastic(negative)


@given(n=st.integers(1, 9), seed=st.integers(0, 10**6), d=st.integers(0, 3))
@settings(deadline=None)
def test_products_without_scipy_are_those_with_it(n, seed, d):
    """Products with vectors and matrices, and the transpose, are the same without scipy."""
    graph = topology.uniform_weights(nx.gnp_random_graph(n, 0.5, seed=seed, directed=True))
    with_scipy = topology.matrices.matrix_of(graph)
    without = topology.matrices.matrix_of(graph)
    without.__dict__["csr"] = None
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d) if d else n)
    expected = oracle(graph) @ x
    np.testing.assert_allclose(without @ x, expected, atol=1e-14)
    np.testing.assert_allclose(with_scipy @ x, expected, atol=1e-14)
    np.testing.assert_allclose(without.transposed.dense(), oracle(graph).T)


def test_products_without_scipy_in_chunks(monkeypatch):
    """A product computed a few columns at a time equals the dense one, also for no columns."""
    matrix = topology.matrices.matrix_of(topology.exponential_two(16))
    matrix.__dict__["csr"] = None
    monkeypatch.setattr(topology.matrices, "CHUNK", 200)  # two columns at a time
    x = np.random.default_rng(0).standard_normal((16, 7))
    np.testing.assert_allclose(matrix @ x, matrix.dense() @ x, atol=1e-14)
    assert (matrix @ x[:, :0]).shape == (16, 0)
