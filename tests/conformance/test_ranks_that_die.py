"""In elastic runs averages go on where a rank dies: its weights go to its neighbours' own."""

from __future__ import annotations

import time

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


def await_view():
    """Wait for the survivors' view, without a verb that others would have to call as often."""
    while bf.view().number == 0:
        bf.current().engine.progress()
        time.sleep(0.001)


def test_a_topology_given_by_name_is_drawn_anew_for_the_survivors():
    """They tend to their own mean; along what is left of the old graph they would not."""

    def averaged():
        bf.set_topology("exponential_two")
        start = torch.tensor([float(2 ** bf.rank())], dtype=torch.float64)
        die_at(DIES_AT)
        await_view()
        x = start
        for _ in range(60):
            x = bf.neighbor_allreduce(x, name="x")
        return x.item(), bf.view(), bf.size(), bf.in_neighbor_ranks()

    for rank, (x, view, size, near) in survivors(averaged).items():
        assert x == pytest.approx((1 + 2 + 8) / 3, abs=1e-12)
        assert (view.number, view.members, view.left, size) == (1, (0, 1, 3), (DEAD,), 3)
        assert DEAD not in near
        assert rank not in near


def test_rounds_belong_to_one_graph_though_ranks_are_rounds_apart():
    """A chain of short messages lets ranks run ahead; the new graph begins where none has been."""

    def averaged():
        bf.set_topology("one_peer_exponential")
        x = torch.full((4,), float(bf.rank()), dtype=torch.float64)
        for k in range(200):
            die_at(k)
            x = bf.neighbor_allreduce(x, name="x")
        return x

    values = list(survivors(averaged).values())
    assert all((x - values[0]).abs().max() < 1e-9 for x in values)


COLLECTIVES = {
    "allreduce": lambda rank: bf.allreduce(torch.full((3,), float(rank)), average=False)[0],
    "a long allreduce": lambda rank: bf.allreduce(torch.full((300_000,), float(rank)))[-1],
    "allreduce_": lambda rank: bf.allreduce_(torch.full((300_000,), float(rank)), average=False)[7],
    "a list": lambda rank: bf.allreduce([torch.full((3,), float(rank)), torch.ones(2)])[0][0],
    "nonblocking": lambda rank: bf.allreduce_nonblocking(torch.ones(5) * rank).wait()[0],
    "allgather": lambda rank: bf.allgather(torch.tensor([rank])).tolist(),
    "broadcast": lambda rank: bf.broadcast(torch.tensor([rank + 5]), 3).item(),
    "barrier": lambda rank: bf.barrier(),
    "objects": lambda rank: bf.allgather_object(rank),
    "an object": lambda rank: bf.broadcast_object([rank], 3),
}


@pytest.mark.parametrize("call", COLLECTIVES)
def test_collectives_are_made_again_among_the_survivors(call):
    """One under way at the death is, and later ones are among the survivors."""

    def called():
        results = []
        for k in range(2 * DIES_AT):
            die_at(k)
            results.append(COLLECTIVES[call](bf.rank()))
        return results

    found = list(survivors(called).values())
    assert all(str(one) == str(found[0]) for one in found)
    values = [float(rank) for rank in range(RANKS) if rank != DEAD]
    after = {
        "allreduce": sum(values),
        "a long allreduce": sum(values) / 3,
        "allreduce_": sum(values),
        "a list": sum(values) / 3,
        "nonblocking": sum(values) / 3,
        "allgather": [0, 1, 3],
        "broadcast": 8,
        "barrier": None,
        "objects": [0, 1, 3],
        "an object": [3],
    }[call]
    for got in found[0][DIES_AT:]:
        assert got == (pytest.approx(after) if isinstance(after, float) else after)


def test_what_the_dead_rank_alone_could_broadcast_is_an_error_of_all():
    """The root has left: named on all survivors, who go on."""

    def called():
        die_at(DIES_AT)
        await_view()
        with pytest.raises(bf.ArgumentError, match=f"root.*{DEAD}"):
            bf.broadcast(torch.zeros(1), DEAD)
        return bf.allreduce(torch.ones(1), average=False).item()

    assert set(survivors(called).values()) == {3.0}


def test_a_rank_that_ends_first_is_in_the_results_that_it_has():
    """The others end the collectives that it has ended, with what it gave, and then go on."""

    def called():
        total = bf.allreduce(torch.full((300_000,), float(bf.rank())), average=False)[-1].item()
        if bf.rank() == 0:
            return total, None
        before = bf.view().number
        return total, (before, bf.allreduce(torch.ones(1), average=False).item(), bf.size())

    with bf.local_world(3, elastic=True, timeout=30) as world:
        results = world.run(called)
    assert [total for total, _ in results] == [3.0] * 3
    assert [rest for _, rest in results] == [None, (0, 2.0, 2), (0, 2.0, 2)]


def test_a_world_is_used_again_after_all_have_ended():
    """Ranks that end one after the other are all members of the next run."""
    with bf.local_world(3, elastic=True, timeout=30) as world:
        for _ in range(3):
            assert world.run(lambda: bf.allreduce(torch.ones(1), average=False).item()) == [3.0] * 3


def after_the_death(call):
    """What a call gives on each survivor in the view without the dead rank."""

    def called():
        bf.barrier()
        die_at(DIES_AT)
        await_view()
        return call()

    return survivors(called)


CALLS = {
    "allgather of different lengths": (lambda: bf.allgather(torch.ones(bf.rank() + 1)).numel(), 7),
    "gather": (lambda: (bf.gather(torch.tensor([bf.rank()]), 3), bf.barrier())[1], None),
    "alltoall": (lambda: bf.alltoall(torch.full((3,), float(bf.rank()))).tolist(), [0, 1, 3]),
    "reduce_scatter": (lambda: bf.reduce_scatter(torch.ones(6)).numel(), 2),
    "objects": (lambda: bf.allgather_object(bf.rank()), [0, 1, 3]),
    "a group of all": (lambda: list(bf.new_group().ranks), [0, 1, 3]),
    "parameters": (lambda: bf.broadcast_parameters({"x": torch.ones(2)}, 0), None),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_collective_is_of_the_survivors(call):
    """Also those that gather records of ranks, whose places are not their numbers."""
    function, expected = CALLS[call]
    assert all(result == expected for result in after_the_death(function).values())


def test_windows_that_are_made_after_a_death_join_the_survivors():
    """Their edges are those of the topology of the view."""

    def averaged():
        assert bf.win_create(torch.full((2,), float(bf.rank())), "w")
        bf.win_put(torch.full((2,), float(bf.rank())), "w")
        bf.barrier()
        return bf.win_update("w")[0].item()

    values = after_the_death(averaged).values()
    assert all(value == pytest.approx(4 / 3) for value in values)


def test_a_call_that_needs_the_dead_ends_at_once_in_a_view_without_it():
    """Averages between machines are along those of the start; nobody waits for another view."""

    def hierarchical():
        with pytest.raises(bf.PeerLeftError, match=f"that have left are rank {DEAD}"):
            bf.hierarchical_neighbor_allreduce(torch.ones(2))
        return True

    assert after_the_death(hierarchical)


def test_what_differs_is_said_of_ranks_by_their_numbers():
    """Rank 3 stands third among the survivors, and is called rank 3."""

    def differs():
        with pytest.raises(bf.MismatchError, match=r"on rank 0 and .* on rank 3"):
            bf.average_model(torch.nn.Linear(1 + (bf.rank() == 3), 1)).__enter__()
        return True

    assert after_the_death(differs)
