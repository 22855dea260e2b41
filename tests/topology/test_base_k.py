"""Base-(k+1) schedules: exact in finite time for every n."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncddp import topology
from asyncddp.topology.schedules._hyper_hypercube import factors_of
from tests.topology.graph_cases import oracle, product

LENGTHS = {  # (n, k): rounds of base_k, of simple_base_k
    (3, 1): (3, 3), (4, 1): (2, 2), (5, 1): (5, 5), (6, 1): (4, 5), (8, 1): (3, 3),
    (12, 1): (5, 7), (16, 1): (4, 4), (5, 2): (3, 3), (6, 2): (2, 2), (9, 2): (2, 2),
    (18, 2): (3, 3), (5, 3): (3, 3), (8, 3): (2, 2), (20, 3): (4, 5), (6, 4): (2, 2),
    (25, 4): (2, 2),
}  # fmt: skip


@pytest.mark.parametrize("n", range(2, 65))
def test_base_2_is_exact_for_every_n_to_1e_12(n):
    """For n = 2 to 64, ``base_k(n, 1)`` averages to 1e-12 after one period and not before."""
    schedule = topology.base_k(n, 1)
    length = topology.finite_time_length(schedule)
    assert isinstance(length, int)
    assert length == schedule.period
    assert abs(product(schedule, length) - 1 / n).max() < 1e-12


@pytest.mark.parametrize("family", [topology.base_k, topology.simple_base_k])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_exact_symmetric_and_within_the_degree(family, k):
    """A period of symmetric rounds of degree ≤ k averages exactly, in ≤ 2·log_{k+1}(n) + 2."""
    for n in (*range(2, 34), 48, 50, 63, 64, 65, 96, 100, 127, 128):
        schedule = family(n, k)
        done = np.eye(n)
        for m in range(schedule.period):
            w = oracle(schedule.graph(m))
            np.testing.assert_array_equal(w, w.T)
            np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-14)
            assert (w != 0).sum(axis=1).max() <= k + 1
            done = w @ done
        np.testing.assert_allclose(done, 1 / n, atol=1e-14)
        assert schedule.period <= 2 * math.log(n, k + 1) + 2


@pytest.mark.parametrize(("n", "k"), LENGTHS)
def test_lengths_are_the_golden_ones(n, k):
    """The periods of ``base_k`` and ``simple_base_k`` equal the reference's for each (n, k)."""
    found = topology.base_k(n, k).period, topology.simple_base_k(n, k).period
    assert found == LENGTHS[n, k]


def _edges(schedule, m):
    """Off-diagonal weights and the diagonal entries below one of a round."""
    w = oracle(schedule.graph(m))
    n = schedule.n
    pairs = {(i, j): w[i, j] for i in range(n) for j in range(i + 1, n) if w[i, j]}
    return pairs, {i: w[i, i] for i in range(n) if w[i, i] < 1}


def test_five_ranks_are_the_golden_example():
    """``base_k(5, 1)`` has the pairs and weights of the reference's example in each round."""
    schedule = topology.base_k(5, 1)
    half = dict.fromkeys(range(4), 0.5)
    for m in (0, 3):
        assert _edges(schedule, m) == ({(0, 1): 0.5, (2, 3): 0.5}, half)
    for m in (1, 4):
        assert _edges(schedule, m) == ({(0, 2): 0.5, (1, 3): 0.5}, half)
    pairs, own = _edges(schedule, 2)
    assert pairs == {(0, 1): 0.5, (3, 4): pytest.approx(0.8)}
    assert own == {0: 0.5, 1: 0.5, 3: pytest.approx(0.2), 4: pytest.approx(0.2)}


def test_six_ranks_are_the_golden_example():
    """``base_k(6, 1)`` has the reference's pairs in each round, and its weights in round 1."""
    schedule = topology.base_k(6, 1)
    for m in (0, 2):
        assert _edges(schedule, m)[0] == {(0, 1): 0.5, (3, 4): 0.5}
    pairs, own = _edges(schedule, 1)
    assert pairs == {(1, 2): pytest.approx(2 / 3), (4, 5): pytest.approx(2 / 3)}
    assert own == dict.fromkeys((1, 2, 4, 5), pytest.approx(1 / 3))
    assert _edges(schedule, 3)[0] == {(0, 3): 0.5, (1, 4): 0.5, (2, 5): 0.5}


@given(n=st.integers(1, 300), k=st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_any_n_and_k_reach_the_average_of_random_values(n, k):
    """For any n and k a period averages exactly, and is no longer than ``simple_base_k``'s."""
    schedule = topology.base_k(n, k)
    assert schedule.period <= topology.simple_base_k(n, k).period
    error = topology.consensus_error(schedule, schedule.period)[-1]
    assert error < 1e-25


@pytest.mark.parametrize(
    ("n", "k", "factors"),
    [(8, 1, (2, 2, 2)), (12, 3, (3, 4)), (6, 3, (2, 3)), (10, 3, ()), (1, 3, ()), (8, 3, (2, 4))],
)
def test_factors_are_largest_first_and_stored_ascending(n, k, factors):
    """``factors_of(n, k)`` takes factors ≤ k + 1, largest first, returned ascending, or none."""
    assert factors_of(n, k) == factors


def test_more_peers_than_ranks_average_at_once():
    """With k ≥ n − 1 the schedule is one round whose weights are all 1/n."""
    schedule = topology.base_k(5, 100)
    assert schedule.period == 1
    np.testing.assert_allclose(oracle(schedule.graph(0)), 1 / 5, atol=1e-15)
