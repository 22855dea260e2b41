"""What mixing does to values: golden errors, and exactness in finite time."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from asyncddp import topology
from tests.topology.graph_cases import label, oracle, product

STEPS = (1, 2, 4, 6, 8, 10, 20, 40)
GOLDEN = {
    (16, "ring"): (2.96e-1, 1.89e-1, 1.17e-1, 8.41e-2, 6.41e-2, 5.04e-2, 1.72e-2, 2.13e-3),
    (16, "grid_2d"): (2.23e-1, 1.12e-1, 4.89e-2, 2.57e-2, 1.42e-2, 7.97e-3, 4.71e-4, 1.69e-6),
    (16, "torus_2d"): (1.47e-1, 4.43e-2, 5.61e-3, 7.27e-4, 9.42e-5, 1.22e-5, 4.46e-10, 5.97e-19),
    (16, "exponential_two"): (
        1.47e-1, 3.40e-2, 2.55e-3, 2.34e-4, 2.45e-5, 2.78e-6, 8.46e-11, 1.11e-19,
    ),
    (64, "ring"): (3.25e-1, 2.24e-1, 1.58e-1, 1.27e-1, 1.09e-1, 9.60e-2, 6.37e-2, 4.04e-2),
    (64, "exponential_two"): (
        1.30e-1, 3.24e-2, 3.98e-3, 6.52e-4, 1.23e-4, 2.59e-5, 2.36e-8, 3.33e-14,
    ),
    (16, "one_peer_exponential"): (4.74e-1, 2.05e-1),
    (64, "one_peer_exponential"): (4.93e-1, 2.40e-1, 4.86e-2),
}  # fmt: skip


def start(n: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, 1000))


@pytest.mark.parametrize(("n", "name"), GOLDEN)
def test_consensus_error_is_the_golden_value(n, name):
    """The relative squared error is 1 at first and the golden value after listed steps."""
    errors = topology.consensus_error(getattr(topology, name)(n), 40, start(n))
    assert errors[0] == 1.0
    assert len(errors) == 41
    directed = 1e-2 if "exponential" in name else 3e-3
    for step, golden in zip(STEPS, GOLDEN[n, name], strict=False):
        assert errors[step] == pytest.approx(golden, rel=directed + 0.005), step


@pytest.mark.parametrize(
    ("schedule", "length"),
    [
        (topology.one_peer_exponential(16), 4),
        (topology.base_k(16, 4), 2),
        (topology.one_peer_exponential(64), 6),
    ],
    ids=label,
)
def test_exact_schedules_leave_only_rounding(schedule, length):
    """An exact schedule's error is > 1e-2 one round before its period ends, < 1e-31 then."""
    errors = topology.consensus_error(schedule, length, start(schedule.n))
    assert errors[length - 1] > 1e-2
    assert errors[length] < 1e-31
    assert topology.base_k(16, 4).period == 2


def test_base_5_on_16_ranks_has_the_golden_first_error():
    """One round of ``base_k(16, 4)`` leaves a relative squared error of 0.207."""
    assert topology.consensus_error(topology.base_k(16, 4), 1, start(16))[1] == pytest.approx(
        2.07e-1, rel=5e-3
    )


def test_error_follows_the_matrices_of_a_schedule_in_order():
    """The error after k rounds is that of the product W(k−1)…W(0), applied to ``x0``."""
    schedule = topology.one_peer_of(topology.grid_2d(6))
    x = np.random.default_rng(1).standard_normal((6, 3))
    expected = [
        np.sum((product(schedule, k) @ x - x.mean(axis=0)) ** 2) / np.sum((x - x.mean(axis=0)) ** 2)
        for k in range(8)
    ]
    np.testing.assert_allclose(topology.consensus_error(schedule, 7, x), expected, rtol=1e-12)


def test_error_stays_where_ranks_agree_on_something_else():
    """If W is only row-stochastic, ranks reach consensus, yet the error stays above zero."""
    biased = topology.uniform_weights(topology.star(6))
    errors = topology.consensus_error(biased, 200)
    w = np.linalg.matrix_power(oracle(biased), 200)
    assert errors[-1] > 0.01
    np.testing.assert_allclose(w, w[0][None].repeat(6, axis=0), atol=1e-12)


def test_one_rank_is_always_in_consensus():
    """For one rank the error is zero after one round, and the finite-time length is 0."""
    np.testing.assert_array_equal(topology.consensus_error(topology.ring(1), 2), [1, 0, 0])
    assert topology.finite_time_length(topology.ring(1)) == 0
    assert topology.finite_time_length(topology.base_k(1, 3)) == 0


@pytest.mark.parametrize(
    ("graph", "length"),
    [
        (topology.complete(7), 1),
        (topology.ring(3), 1),
        (topology.ring(2), 1),
        (topology.exponential_two(3), 1),
        (topology.ring(8), None),
        (topology.hypercube(8), None),
        (topology.one_peer_exponential(32), 5),
        (topology.one_peer_exponential(24), None),
        (topology.one_peer_hypercube(16), 4),
        (topology.shift_one(4), 2),
        (topology.shift_one(6), None),
        (topology.one_peer_of(topology.exponential_two(16)), 4),
        (topology.alternating_exponential_ring(16, 4), 4),
        (topology.equi_dynamic(12, seed=0), None),
        (topology.matcha(topology.ring(6), 0.5, seed=0), None),
        (topology.push_weights(topology.star(5)), None),
        (topology.uniform_weights(topology.star(5)), None),
        (topology.simple_base_k(12, 1), 7),
    ],
    ids=label,
)
def test_finite_time_length(graph, length):
    """The finite-time length is the first round with an exact average, None without one."""
    assert topology.finite_time_length(graph) == length


def test_coming_close_fast_is_not_being_exact():
    """A graph one thousandth away from J passes 1e-12 in a few rounds, and is still not exact."""
    for distance in (1e-1, 1e-3, 1e-4):
        w = (1 - distance) / 5 + distance * np.eye(5)
        assert topology.finite_time_length(topology.from_adjacency(w), max_rounds=50) is None


def test_exactness_of_random_vectors_is_confirmed_on_the_identity():
    """Rows that agree, but not on the average, are not exact."""
    w = np.tile([0.4, 0.3, 0.2, 0.1], (4, 1))
    assert topology.finite_time_length(topology.from_adjacency(w)) is None


def test_finite_time_search_ends_at_max_rounds():
    """A schedule that is exact after more than ``max_rounds`` rounds counts as not exact."""
    schedule = topology.base_k(12, 1)
    assert topology.finite_time_length(schedule, max_rounds=4) is None
    assert topology.finite_time_length(schedule, max_rounds=5) == 5


def test_blocks_of_the_identity_give_the_same_answer(monkeypatch):
    """The finite-time length does not depend on how many columns are mixed at a time."""
    monkeypatch.setattr(topology.consensus, "BLOCK", 5 * 23)
    assert topology.finite_time_length(topology.base_k(23, 1)) == topology.base_k(23, 1).period


def test_undirected_graph_is_refused_with_the_remedy():
    """An undirected graph raises ``TopologyError``, which names ``metropolis_weights``."""
    with pytest.raises(topology.TopologyError, match=r"undirected; .*metropolis_weights"):
        topology.finite_time_length(nx.cycle_graph(4))
