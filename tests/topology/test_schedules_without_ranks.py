"""Schedules without some ranks: rows sum to one, and parts do not leak into each other."""

from __future__ import annotations

import pytest

from asyncddp import topology
from asyncddp.topology.schedule import between_ranks, connected_parts, without_ranks

GRAPHS = {
    "ring": topology.ring(6),
    "exponential_two": topology.exponential_two(6),
    "one_peer_exponential": topology.one_peer_exponential(6),
}


@pytest.mark.parametrize("left", [{2}, {0, 3}, {0, 2, 3, 5}])
@pytest.mark.parametrize("graph", GRAPHS)
def test_rows_sum_to_one_and_name_nobody_who_has_left(graph, left):
    """Each rank that has left keeps its own value; sources and targets name each other."""
    whole = topology.as_schedule(GRAPHS[graph])
    schedule = without_ranks(whole, left)
    for k in range(schedule.period):
        near = [schedule.neighbors(rank, k) for rank in range(6)]
        for rank, its in enumerate(near):
            assert its.self_weight + sum(its.src_weights.values()) == pytest.approx(1)
            assert not left & {rank, *its.src_weights, *its.dst_ranks} or rank in left
            assert all(rank in near[source].dst_ranks for source in its.src_weights)
            assert all(rank in near[target].src_weights for target in its.dst_ranks)
        assert all(near[rank].self_weight == 1 for rank in left)


def test_parts_are_those_that_stay_strongly_connected():
    """Of a ring of six without 0 and 3 two pairs are left; without one rank all hold together."""
    ring = topology.as_schedule(topology.ring(6))
    assert connected_parts(ring, {0, 3}) == [{1, 2}, {4, 5}]
    assert connected_parts(ring, {0}) == [{1, 2, 3, 4, 5}]
    one_way = topology.as_schedule(topology.ring(3, style="right"))
    assert connected_parts(one_way, {0}) == [{1}, {2}]
    assert without_ranks(one_way, {0}).neighbors(2, 0).src_weights == {}


def test_members_take_the_places_of_a_smaller_schedule():
    """Rank members[p] has the neighbours of place p; others keep their own value."""
    schedule = between_ranks(topology.as_schedule(topology.ring(3)), [1, 4, 5], 6)
    assert schedule.n == 6
    assert set(schedule.neighbors(4, 0).src_weights) == {1, 5}
    assert schedule.neighbors(0, 0) == topology.Neighbors(1.0, {}, ())
