"""Seconds, bytes and messages of a step against the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncddp import topology
from asyncddp.topology import Link, Links
from asyncddp.transport.collective_algorithms import FEW_RANKS
from tests.topology.graph_cases import build, label

B, LATENCY, BANDWIDTH = 4e8, 1e-5, 1e9
LINK = Link(LATENCY, BANDWIDTH)
MACHINES = Links(Link(1e-3, 1e8), ranks_per_machine=4, inside=Link(1e-6, 1e10))


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
    """The busiest rank's messages leave at once: one latency, and bytes/bandwidth of all."""
    cost = topology.communication_cost(graph, B, LINK)
    assert cost.name == topology.describe(graph)
    assert cost.neighbors.messages_per_rank == messages
    assert cost.neighbors.bytes_per_rank == messages * B
    assert cost.neighbors.seconds == pytest.approx(LATENCY + messages * B / BANDWIDTH)


@pytest.mark.parametrize("n", [2, 5, 8, 100])
def test_allreduces_cost_the_textbook_formulas(n):
    """With a link for each rank, what the textbooks give; the hierarchy is then of ranks alone."""
    cost = topology.communication_cost(topology.ring(n), B, LINK)
    ring, tree, halving = cost.ring_allreduce, cost.tree_allreduce, cost.halving_doubling_allreduce
    assert ring.seconds == pytest.approx(2 * (n - 1) * (LATENCY + B / n / BANDWIDTH))
    assert ring.bytes_per_rank == pytest.approx(2 * (n - 1) / n * B)
    assert ring.messages_per_rank == ring.rounds == 2 * (n - 1)
    depth = math.ceil(math.log2(n))
    assert tree.seconds == pytest.approx(2 * depth * (LATENCY + B / BANDWIDTH))
    assert (tree.messages_per_rank, tree.rounds) == (depth, 2 * depth)
    power = 2 ** math.floor(math.log2(n))
    folds = n != power  # the others send all they have, and get all back
    sent = (2 * (power - 1) / power + 2 * folds) * B
    messages = 2 * math.log2(power)
    assert halving.seconds == pytest.approx((messages + 2 * folds) * LATENCY + sent / BANDWIDTH)
    assert halving.bytes_per_rank == pytest.approx(sent - folds * B)
    assert (halving.messages_per_rank, halving.rounds) == (messages + folds, messages + 2 * folds)
    own = cost.hierarchical_allreduce
    in_a_row = 2 if n <= FEW_RANKS else 2 * (n - 1)
    assert own.seconds == pytest.approx(in_a_row * LATENCY + 2 * (n - 1) / n * B / BANDWIDTH)
    assert own.bytes_per_rank == pytest.approx(ring.bytes_per_rank)
    assert (own.messages_per_rank, own.rounds) == (ring.messages_per_rank, in_a_row)


@pytest.mark.parametrize(("machines", "local"), [(1, 4), (2, 4), (5, 4), (16, 4), (17, 4), (3, 8)])
def test_hierarchical_allreduce_is_a_ring_inside_and_direct_between_few_machines(machines, local):
    """2(L-1)(α' + B/Lβ') + rα + 2(M-1)B/Mβ: parts of a tensor travel, together one tensor."""
    near, far = MACHINES.inside, MACHINES.between
    links = Links(far, local, near)
    found = topology.communication_cost(topology.ring(machines * local), B, links)
    inside, between = 2 * (local - 1), 2 * (machines - 1)
    in_a_row = min(between, 2) if machines <= FEW_RANKS else between
    cost = found.hierarchical_allreduce
    assert cost.seconds == pytest.approx(
        inside * (near.latency + B / local / near.bandwidth)
        + in_a_row * far.latency
        + between * B / machines / far.bandwidth
    )
    assert (cost.messages_per_rank, cost.rounds) == (inside + between, inside + in_a_row)
    sent = inside / local * B + between / machines * B / local
    assert cost.bytes_per_rank == pytest.approx(sent)


def test_a_ring_in_the_order_of_ranks_leaves_each_machine_once():
    """Its chunks go at the pace of the links between machines, a quarter of whose latencies count.

    Of four hops one leaves the machine, so that a chunk on its way meets its latency once in four.
    """
    cost = topology.communication_cost(topology.ring(16), B, MACHINES).ring_allreduce
    latency = (MACHINES.between.latency + 3 * MACHINES.inside.latency) / 4
    assert cost.seconds == pytest.approx(30 * (latency + B / 16 / MACHINES.between.bandwidth))


def test_rounds_inside_machines_cost_what_is_inside():
    """A tree, and halving, exchange their large parts inside, where they come first."""
    cost = topology.communication_cost(topology.ring(16), B, MACHINES)
    near, far = MACHINES.inside, MACHINES.between
    expected = 4 * (near.latency + B / near.bandwidth) + 4 * (far.latency + B / far.bandwidth)
    assert cost.tree_allreduce.seconds == pytest.approx(expected)
    shares = [(near, B / 2), (near, B / 4), (far, 4 * B / 8), (far, 4 * B / 16)]
    expected = sum(2 * (link.latency + sent / link.bandwidth) for link, sent in shares)
    assert cost.halving_doubling_allreduce.seconds == pytest.approx(expected)


def test_one_peer_schedules_share_a_machine_s_link_as_they_leave_it():
    """One distance after the other: 1, 2, 3, 4 … of four ranks leave; of inner_outer always one."""
    far = MACHINES.between
    rounds = [far.latency + leaving * B / far.bandwidth for leaving in (1, 2, 4, 4)]
    cost = topology.communication_cost(topology.one_peer_exponential(16), B, MACHINES)
    assert cost.neighbors.seconds == pytest.approx(np.mean(rounds))
    cost = topology.communication_cost(topology.inner_outer_exponential(16, 4), B, MACHINES)
    assert cost.neighbors.seconds == pytest.approx(far.latency + B / far.bandwidth)


@pytest.mark.parametrize("links", [Links(LINK), MACHINES], ids=["one each", "four"])
@pytest.mark.parametrize(
    "schedule",
    [
        topology.base_k(16, 2),
        topology.one_peer_exponential(16),
        topology.matcha(topology.ring(16), 0.5, seed=0),
    ],
    ids=label,
)
def test_a_schedule_costs_the_mean_of_its_rounds(schedule, links):
    """Seconds, bytes and messages are the mean of what each round's graph costs by itself."""
    count = schedule.period or 16
    each = [
        topology.communication_cost(schedule.graph(k), B, links).neighbors for k in range(count)
    ]
    found = topology.communication_cost(schedule, B, links).neighbors
    assert found.seconds == pytest.approx(sum(one.seconds for one in each) / count)
    assert found.bytes_per_rank == pytest.approx(sum(one.bytes_per_rank for one in each) / count)


def test_a_hypercube_sends_in_one_step_what_its_one_peer_schedule_sends_in_a_period():
    """The bytes of log2 n rounds at once, with one latency; pairs cost what one-way shifts do."""
    whole = topology.communication_cost(topology.hypercube(16), B, LINK).neighbors
    pairs = topology.communication_cost(topology.one_peer_hypercube(16), B, LINK).neighbors
    shifts = topology.communication_cost(topology.one_peer_exponential(16), B, LINK).neighbors
    assert pairs == shifts
    assert whole.bytes_per_rank == 4 * pairs.bytes_per_rank
    assert whole.seconds == pytest.approx(4 * pairs.seconds - 3 * LATENCY)


FAMILIES = [build(builder, 16) for builder in (topology.GRAPHS | topology.SCHEDULES).values()]


@pytest.mark.parametrize("graph", FAMILIES, ids=label)
def test_better_links_are_never_slower(graph):
    """More bandwidth, less latency, a slow link made fast: nothing takes longer, of any family."""

    def times(links):
        found = topology.communication_cost(graph, 1e6, links)
        return [found.neighbors.seconds, *(cost.seconds for cost in found.allreduces.values())]

    far, near = Link(1e-3, 1e7), Link(1e-5, 1e9)
    slow = {1: Link(1e-2, 1e6), (0, 2): Link(5e-3, 1e6)}
    base = times(Links(far, 4, near, slow))
    for better in (
        Links(Link(1e-3, 3e7), 4, near, slow),
        Links(Link(2e-4, 1e7), 4, near, slow),
        Links(far, 4, Link(1e-5, 3e9), slow),
        Links(far, 4, Link(1e-6, 1e9), slow),
        Links(far, 4, near, {(0, 2): slow[0, 2]}),
        Links(far, 4, near, {1: slow[1]}),
    ):
        assert all(a <= b * (1 + 1e-12) for a, b in zip(times(better), base, strict=True))


def test_speedup_compares_with_the_fastest_allreduce():
    """Speedup is over a ring's bytes for large tensors, over log2 n latencies for tiny ones."""
    cost = topology.communication_cost(topology.one_peer_exponential(64), B, Link(0.0, BANDWIDTH))
    assert cost.speedup == pytest.approx(2 * 63 / 64)
    tiny = topology.communication_cost(topology.one_peer_exponential(64), 8, LINK)
    assert tiny.speedup == pytest.approx(2 * 6, rel=1e-2)


def test_one_rank_sends_nothing():
    """For one rank every cost is zero, and the speedup is infinite."""
    cost = topology.communication_cost(topology.ring(1), B, MACHINES)
    assert {cost.neighbors, *cost.allreduces.values()} == {topology.Cost(0, 0, 0, 0)}
    assert cost.speedup == math.inf


@pytest.mark.parametrize("nbytes", [-1, math.nan, math.inf])
def test_impossible_sizes_are_refused(nbytes):
    """Negative, NaN and infinite bytes raise an error that names the bound."""
    with pytest.raises(topology.TopologyError) as caught:
        topology.communication_cost(topology.ring(4), nbytes)
    message = f"communication_cost needs nbytes >= 0 in bytes, got nbytes={nbytes}"
    assert str(caught.value) == message
