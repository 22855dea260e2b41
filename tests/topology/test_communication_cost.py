"""Seconds, bytes and messages of a step against the formulas."""

from __future__ import annotations

import math

import pytest
from graph_cases import label

import topology

B, LATENCY, BANDWIDTH = 4e8, 1e-5, 1e9
WHOLE = LATENCY + B / BANDWIDTH


@pytest.mark.parametrize(
    ("graph", "messages"),
    [
        (topology.ring(8), 2),
        (topology.exponential_two(8), 3),
        (topology.star(8), 7),
        (topology.one_peer_exponential(8), 1),
        (topology.one_peer_of(topology.star(8)), 7),
        (topology.base_k(5, 1), 1),
        (topology.alternating_exponential_ring(8, 2), 3),
        (topology.push_weights(topology.grid_2d(9)), 4),
    ],
    ids=label,
)
def test_step_costs_the_messages_of_the_busiest_rank(graph, messages):
    """A step costs the busiest rank's messages, each of latency + bytes/bandwidth seconds."""
    cost = topology.communication_cost(graph, B, LATENCY, BANDWIDTH)
    assert cost.name == topology.describe(graph)
    assert cost.neighbors.messages_per_rank == messages
    assert cost.neighbors.bytes_per_rank == messages * B
    assert cost.neighbors.seconds == pytest.approx(messages * WHOLE)


@pytest.mark.parametrize("n", [2, 5, 8, 100])
def test_allreduces_cost_the_textbook_formulas(n):
    """Ring and tree allreduce cost what the textbook formulas give for n ranks."""
    cost = topology.communication_cost(topology.ring(n), B, LATENCY, BANDWIDTH)
    ring, tree = cost.ring_allreduce, cost.tree_allreduce
    assert ring.seconds == pytest.approx(2 * (n - 1) * (LATENCY + B / n / BANDWIDTH))
    assert ring.bytes_per_rank == pytest.approx(2 * (n - 1) / n * B)
    assert ring.messages_per_rank == 2 * (n - 1)
    assert tree.seconds == pytest.approx(2 * math.ceil(math.log2(n)) * WHOLE)
    assert tree.messages_per_rank == math.ceil(math.log2(n))


def test_rounds_of_a_schedule_are_averaged():
    """Messages per rank of a schedule are the mean over its period of each round's maximum."""
    schedule = topology.base_k(7, 2)
    messages = [
        max(len(schedule.neighbors(rank, k).dst_ranks) for rank in range(7))
        for k in range(schedule.period)
    ]
    cost = topology.communication_cost(schedule, B, LATENCY, BANDWIDTH)
    assert len(set(messages)) > 1
    assert cost.neighbors.messages_per_rank == sum(messages) / len(messages)


def test_speedup_compares_with_the_faster_allreduce():
    """Speedup is over the ring allreduce for large tensors, over the tree for tiny ones."""
    cost = topology.communication_cost(topology.one_peer_exponential(64), B, 0.0, BANDWIDTH)
    assert cost.speedup == pytest.approx(2 * 63 / 64)
    tiny = topology.communication_cost(topology.one_peer_exponential(64), 8, LATENCY, BANDWIDTH)
    assert tiny.speedup == pytest.approx(2 * 6, rel=1e-2)


def test_one_rank_sends_nothing():
    """For one rank every cost is zero, and the speedup is infinite."""
    cost = topology.communication_cost(topology.ring(1), B)
    assert cost.neighbors == cost.ring_allreduce == cost.tree_allreduce == topology.Cost(0, 0, 0)
    assert cost.speedup == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nbytes": -1}, "needs nbytes >= 0 in bytes, got nbytes=-1"),
        ({"nbytes": 1, "latency": math.nan}, "needs latency >= 0 in seconds, got latency=nan"),
        (
            {"nbytes": 1, "bandwidth": 0},
            "needs bandwidth > 0 in bytes per second, got bandwidth=0",
        ),
    ],
)
def test_impossible_numbers_are_refused(arguments, message):
    """Negative bytes, a NaN latency and zero bandwidth raise an error that names the bound."""
    with pytest.raises(topology.TopologyError) as caught:
        topology.communication_cost(topology.ring(4), **arguments)
    assert message in str(caught.value)
