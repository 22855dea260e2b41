"""MATCHA: matchings, activation probabilities, step."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncddp import topology
from asyncddp.topology.schedules._edge_coloring import matchings_of
from asyncddp.topology.schedules.matcha import _design, _Links, _probabilities, _project
from tests.topology.graph_cases import oracle


def design(graph: nx.Graph, budget: float) -> tuple[np.ndarray, float, float]:
    return _design(_Links(len(graph), matchings_of(len(graph), graph.edges())), budget)


@given(n=st.integers(2, 24), density=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_edges_are_cut_into_at_most_one_matching_more_than_the_degree(n, density, seed):
    """Each edge is in exactly one of at most (maximum degree + 1) matchings."""
    graph = nx.gnp_random_graph(n, density, seed=seed)
    matchings = matchings_of(n, graph.edges())
    assert sorted(e for matching in matchings for e in matching) == sorted(graph.edges())
    for matching in matchings:
        ends = [end for edge in matching for end in edge]
        assert len(ends) == len(set(ends)) > 0
    assert len(matchings) <= max(dict(graph.degree()).values()) + 1


@pytest.mark.parametrize(
    ("budget", "alpha", "factor"),
    [(1, 0.436, 0.5544), (0.75, 0.507, 0.6606), (0.5, 0.607, 0.7840), (0.25, 0.607, 0.9111)],
)
def test_ring_of_eight_has_the_golden_step_and_factor(budget, alpha, factor):
    """On a ring of eight, probabilities, step and contraction factor are the golden ones."""
    chance, found, reached = design(nx.cycle_graph(8), budget)
    np.testing.assert_allclose(chance, [budget, budget], atol=1e-4)
    assert found == pytest.approx(alpha, abs=1.5e-3)
    assert reached == pytest.approx(factor, abs=5e-4)


@pytest.mark.parametrize("graph", [nx.cycle_graph(8), nx.star_graph(5), nx.barbell_graph(4, 1)])
def test_whole_budget_is_the_optimal_static_step(graph):
    """At budget 1 every matching is always active, and the step is 2 / (λ₂ + λ_max)."""
    values = np.linalg.eigvalsh(nx.laplacian_matrix(graph).toarray().astype(float))
    chance, alpha, _ = design(graph, 1)
    assert (chance == 1).all()
    assert alpha == pytest.approx(2 / (values[1] + values[-1]), abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_probabilities_are_as_good_as_a_general_optimiser_finds(seed):
    """λ₂ of the mean Laplacian is > 0.99 of SLSQP's and > 1.02 of that of equal chances."""
    minimize = pytest.importorskip("scipy.optimize", reason="compares with scipy").minimize
    graph = nx.connected_watts_strogatz_graph(12, 4, 0.5, seed=seed)
    links = _Links(12, matchings_of(12, graph.edges()))
    best = minimize(
        lambda p: -links.slowest(p, 1e-3)[0],
        np.full(links.count, 0.5),
        jac=lambda p: -links.slowest(p, 1e-3)[1],
        bounds=[(0, 1)] * links.count,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 0.5 * links.count},
        method="SLSQP",
    )
    ours = _probabilities(links, 0.5)
    assert links.slowest(ours, 1.0)[2] > 0.99 * links.slowest(best.x, 1.0)[2]
    assert links.slowest(ours, 1.0)[2] > 1.02 * links.slowest(np.full(links.count, 0.5), 1.0)[2]
    assert ours.sum() <= 0.5 * links.count + 1e-9
    assert ((ours >= 0) & (ours <= 1)).all()


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8).map(np.array), st.floats(0.05, 1.0))
@settings(deadline=None)
def test_projection_lands_on_the_budget_and_keeps_the_order(point, budget):
    """The projection has entries in 0..1 that sum to the budget, ordered as the point's."""
    total = budget * len(point)
    near = _project(point, total)
    assert ((near >= 0) & (near <= 1)).all()
    assert near.sum() == pytest.approx(total, abs=1e-6)
    assert (np.diff(near[np.argsort(point, kind="stable")]) >= 0).all()


def test_important_links_are_used_more_often():
    """The bridge of a barbell is in every round's interest."""
    graph = nx.barbell_graph(4, 0)
    links = _Links(8, matchings_of(8, graph.edges()))
    chance = _probabilities(links, 0.5)
    bridge = next(
        g for g, i, j in zip(links.group, links.tail, links.head, strict=True) if (i, j) == (3, 4)
    )
    assert chance[bridge] == chance.max() > 0.8


def test_rounds_are_identity_minus_alpha_times_active_laplacians():
    """Weights between ranks are 0 or one alpha, on the graph's edges; half are active."""
    graph = topology.grid_2d(9)
    schedule = topology.matcha(graph, 0.5, seed=2)
    allowed = oracle(graph) > 0
    alphas, used = set(), []
    for k in range(200):
        w = oracle(schedule.graph(k))
        off = w[~np.eye(9, dtype=bool)]
        alphas |= set(off[off != 0])
        assert not (w[~allowed]).any()
        used.append((off != 0).sum() / (allowed.sum() - 9))
    assert len(alphas) == 1
    assert np.mean(used) == pytest.approx(0.5, abs=0.06)


def test_mean_squared_distance_shrinks_by_the_designed_factor():
    """The greatest eigenvalue of the mean of WᵀW − J over rounds is the designed factor."""
    schedule = topology.matcha(topology.ring(8), 0.5, seed=0)
    rounds = [oracle(schedule.graph(k)) for k in range(1500)]
    second = np.mean([w.T @ w for w in rounds], axis=0) - 1 / 8
    assert np.linalg.eigvalsh(second)[-1] == pytest.approx(0.7839, abs=0.02)


def test_undirected_networkx_graphs_serve_as_well():
    """A ``networkx.Graph`` gives the same rounds as the directed graph with both directions."""
    a = topology.matcha(nx.cycle_graph(8), 0.5, seed=0)
    b = topology.matcha(topology.ring(8), 0.5, seed=0)
    assert all(a.neighbors(3, k) == b.neighbors(3, k) for k in range(20))


def test_one_rank_has_nothing_to_do():
    """On one rank every round has self weight 1 and no neighbours."""
    schedule = topology.matcha(topology.ring(1), 0.5, seed=0)
    assert schedule.neighbors(0, 9) == topology.Neighbors(1.0, {}, ())
