"""In elastic runs averages go on where a rank dies: its weights go to its neighbours' own."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology

RANKS, DEAD, DIES_AT, ROUNDS = 4, 2, 5, 12
GRAPHS = {
    "ring": topology.ring,
    "exponential_two": topology.exponential_two,
    "one_peer_exponential": topology.one_peer_exponential,
}


class DiesError(Exception):
    """End of a rank in the middle of its function."""


def mixing_matrix(graph, k, dead=()):
    """W of round k in float64; the weights of dead ranks are on the diagonal of the others."""
    schedule = topology.as_schedule(graph)
    matrix = torch.zeros(RANKS, RANKS, dtype=torch.float64)
    for rank in range(RANKS):
        near = schedule.neighbors(rank, k)
        matrix[rank, rank] = near.self_weight
        for source, weight in near.src_weights.items():
            matrix[rank, rank if source in dead and rank not in dead else source] += weight
    return matrix


def survivors(elastic_step, *args):
    """What the survivors return where rank DEAD raises in the middle of its steps."""
    results = {}

    def body():
        results[bf.rank()] = elastic_step(*args)

    with (
        pytest.raises(bf.RankError, match=f"rank {DEAD} raised DiesError") as raised,
        bf.local_world(RANKS, elastic=True, timeout=20) as world,
    ):
        world.run(body)
    assert "also" not in str(raised.value)  # no other rank has failed
    assert sorted(results) == [rank for rank in range(RANKS) if rank != DEAD]
    return results


def die_at(k):
    if bf.rank() == DEAD and k == DIES_AT:
        raise DiesError


def averages(make, shape, average):
    bf.set_topology(make(RANKS))
    x = torch.full(shape, float(bf.rank()), dtype=torch.float64)
    for k in range(ROUNDS):
        die_at(k)
        x = average(x)
    return x


AVERAGES = {
    "blocking": lambda x: bf.neighbor_allreduce(x, name="x"),
    "nonblocking": lambda x: bf.neighbor_allreduce_nonblocking(x, name="x").wait(),
    "in place": lambda x: bf.neighbor_allreduce_(x, name="x"),
    "a list": lambda x: bf.neighbor_allreduce([x, x[:1]], name="x")[0],
    "compressed": lambda x: bf.neighbor_allreduce(x.float(), name="x", compression="bf16").double(),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("shape", [(3,), (300_000,)], ids=["short", "long"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_averages_go_on_with_the_weights_of_the_dead_on_the_diagonal(graph, shape, average):
    """Every survivor has (W without the dead)^(k rounds since) W^(k rounds before) x."""
    make = GRAPHS[graph]
    expected = torch.arange(RANKS, dtype=torch.float64)
    for k in range(ROUNDS):
        expected = mixing_matrix(make(RANKS), k, (DEAD,) if k >= DIES_AT else ()) @ expected
    tolerance = 0.1 if average == "compressed" else 1e-12
    for rank, x in survivors(averages, make, shape, AVERAGES[average]).items():
        assert (x - expected[rank]).abs().max() < tolerance


def test_neighbours_that_are_named_by_hand_are_left_out_as_well():
    """Weights of a call name the dead rank for ever."""

    def by_hand():
        x = torch.tensor([float(bf.rank())], dtype=torch.float64)
        near = topology.neighbors_of(topology.ring(RANKS), bf.rank())
        weights = {"self_weight": near.self_weight, "src_weights": near.src_weights}
        for k in range(ROUNDS):
            die_at(k)
            x = bf.neighbor_allreduce(x, **weights, dst_weights=near.dst_ranks, name="x")
        return x

    expected = torch.arange(RANKS, dtype=torch.float64)
    for k in range(ROUNDS):
        expected = (
            mixing_matrix(topology.ring(RANKS), k, (DEAD,) if k >= DIES_AT else ()) @ expected
        )
    for rank, x in survivors(by_hand).items():
        assert (x - expected[rank]).abs().max() < 1e-12


def test_gathers_from_neighbours_are_of_those_that_live():
    """neighbor_allgather has no rows of the dead."""

    def gathers():
        bf.set_topology(topology.ring(RANKS))
        rows = [bf.neighbor_allgather(torch.tensor([bf.rank()]), name="x") for k in range(DIES_AT)]
        die_at(DIES_AT)
        rows += [bf.neighbor_allgather(torch.tensor([bf.rank()]), name="x") for k in range(3)]
        return [row.tolist() for row in rows]

    for rank, rows in survivors(gathers).items():
        near = sorted({(rank - 1) % RANKS, (rank + 1) % RANKS})
        assert rows[:DIES_AT] == [near] * DIES_AT
        assert rows[DIES_AT:] == [[peer for peer in near if peer != DEAD]] * 3


def test_what_only_the_dead_could_give_is_an_error():
    """A receive from the dead rank ends with an error that names it."""

    def receives():
        die_at(DIES_AT)
        with pytest.raises(bf.PeerLeftError, match=f"rank {DEAD} has left.*DiesError"):
            bf.recv(torch.zeros(1), DEAD, name="x")
        return True

    assert survivors(receives)


def test_without_elastic_a_death_is_an_error_of_all_that_need_the_dead():
    """As before: nobody goes on."""

    def body():
        averages(topology.ring, (3,), AVERAGES["blocking"])

    with (
        pytest.raises(bf.RankError, match=r"DiesError.*also.*PeerLeftError"),
        bf.local_world(RANKS, timeout=20) as world,
    ):
        world.run(body)
