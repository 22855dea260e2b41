"""Ten thousand ranks: building and judging takes seconds, and no n² memory."""

from __future__ import annotations

import math
import time
import tracemalloc

import pytest
from graph_cases import label

import topology

N = 10_000


@pytest.mark.parametrize(
    ("build", "seconds"),
    [
        (lambda: topology.exponential_two(N), 5),
        (lambda: topology.as_schedule(topology.exponential_two(N)), 5),
        (lambda: topology.base_k(4096, 1), 1),
        (lambda: topology.base_k(N, 1), 1),
        (lambda: topology.equi_static(N, 8), 5),
        (lambda: topology.grid_2d(N), 5),
        (lambda: topology.one_peer_of(topology.grid_2d(N)), 5),
    ],
)
def test_building_takes_seconds(build, seconds):
    begin = time.perf_counter()
    build()
    assert time.perf_counter() - begin < seconds


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
    begin = time.perf_counter()
    for k in range(1000):
        near = schedule.neighbors(schedule.n - 7, k)
        assert len(near.dst_ranks) <= 15
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    ("family", "arguments", "rate"),
    [
        (topology.exponential_two, (N,), 13 / 15),
        (topology.ring, (N,), (1 + 2 * math.cos(2 * math.pi / N)) / 3),
        (topology.star, (N,), 1 - 1 / N),
        (topology.hypercube, (8192,), 12 / 14),
        (topology.base_k, (4095, 3), 0.0),
    ],
)
def test_closed_forms_hold_at_ten_thousand_ranks(family, arguments, rate):
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    graph = family(*arguments)
    assert topology.consensus_rate(graph) == pytest.approx(rate, abs=1e-9)
    assert topology.spectral_gap(graph) == pytest.approx(1 - rate, abs=1e-9)
    assert topology.is_doubly_stochastic(graph)
    assert topology.min_eigenvalue(graph) >= -1


def test_random_regular_of_ten_thousand_ranks_is_nearly_ramanujan():
    pytest.importorskip("scipy", reason="sparse routines need scipy")
    graph = topology.random_regular(N, 4, seed=0)
    assert topology.consensus_rate(graph) == pytest.approx((1 + 2 * math.sqrt(3)) / 5, abs=2e-3)


def test_errors_and_exactness_need_no_dense_matrix():
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
