"""Thousands of ranks: building and judging grows with the edges, and takes no n² memory."""

from __future__ import annotations

import math
import sys
import tracemalloc

import pytest

from asyncddp import topology
from tests.topology.graph_cases import label

N = 4096


def calls_of(action):
    """How many functions are called: what an action costs, on a busy machine too."""
    count, before = 0, sys.getprofile()

    def counting(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def lowest_of_exponential_two():
    """The least real part of the sums of 13 roots of unity, which are a circulant's eigenvalues."""
    roots = [math.cos(2 * math.pi * k / N) for k in range(N)]
    return min((1 + sum(roots[k * 2**j % N] for j in range(12))) / 13 for k in range(N))


def peak_of(action):
    """Bytes in use at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "build",
    [
        topology.exponential_two,
        lambda n: topology.as_schedule(topology.exponential_two(n)),
        lambda n: topology.base_k(n, 1),
        lambda n: topology.equi_static(n, 8),
        topology.grid_2d,
        lambda n: topology.one_peer_of(topology.grid_2d(n)),
    ],
    ids=["exponential", "as_schedule", "base_k", "equi_static", "grid", "one_peer_of"],
)
def test_building_costs_no_more_than_n_log_n(build):
    """Of four times as many ranks: calls and memory of n log n grow fivefold, of n² sixteenfold."""
    few, many = N // 10, 4 * N // 10
    build(few)  # what is imported and cached on the first call
    for cost in (calls_of, peak_of):
        once = cost(lambda: build(few))
        assert cost(lambda: build(many)) < 8 * once + 10_000, cost.__doc__


@pytest.mark.parametrize(
    "schedule",
    [
        topology.one_peer_exponential(10**9),
        topology.base_k(10**9 + 7, 2),
        topology.inner_outer_exponential(10**8, 8),
        topology.equi_dynamic(10**9, seed=0),
        topology.alternating_exponential_ring(2**30, 8),
    ],
    ids=label,
)
def test_look_up_of_one_rank_does_not_depend_on_n(schedule):
    """A thousand look-ups among a billion ranks; tables would not fit into memory."""

    def look_up():
        for k in range(1000):
            near = schedule.neighbors(schedule.n - 7, k)
            assert len(near.dst_ranks) <= 15

    assert calls_of(look_up) < 1000 * 300


@pytest.mark.parametrize(
    ("family", "arguments", "rate", "lowest"),
    [
        (topology.exponential_two, (N,), 11 / 13, lowest_of_exponential_two),
        (topology.ring, (N,), (1 + 2 * math.cos(2 * math.pi / N)) / 3, lambda: -1 / 3),
        (topology.star, (N,), 1 - 1 / N, lambda: 0.0),
        (topology.hypercube, (4096,), 11 / 13, lambda: -11 / 13),
        # rank 4094 with three leaves: its own weight is 7/199, that of each leaf 64/199
        (topology.base_k, (4095, 3), 0.0, lambda: (7 - 64) / 199),
    ],
)
def test_closed_forms_hold_at_thousands_of_ranks(family, arguments, rate, lowest):
    """With some 4,096 ranks rate, gap and lowest eigenvalue equal closed forms to 1e-9."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    graph = family(*arguments)
    assert topology.consensus_rate(graph) == pytest.approx(rate, abs=1e-9)
    assert topology.spectral_gap(graph) == pytest.approx(1 - rate, abs=1e-9)
    assert topology.is_doubly_stochastic(graph)
    assert topology.min_eigenvalue(graph) == pytest.approx(lowest(), abs=1e-9)


def test_random_regular_of_thousands_of_ranks_is_nearly_ramanujan():
    """The rate of a 4-regular random graph on 4,096 ranks is within 5e-3 of (1 + 2√3) / 5."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    graph = topology.random_regular(N, 4, seed=0)
    assert topology.consensus_rate(graph) == pytest.approx((1 + 2 * math.sqrt(3)) / 5, abs=5e-3)


def test_errors_and_exactness_need_no_dense_matrix():
    """Errors and finite-time length of 4,096 ranks take less than half an n × n matrix."""
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    n = 4096
    tracemalloc.start()
    errors = topology.consensus_error(topology.exponential_two(n), 10)
    length = topology.finite_time_length(topology.one_peer_exponential(n))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert errors[-1] < 1e-4
    assert length == 12
    assert peak < 8 * n**2 / 2
