"""A local world of many ranks: it ends, and says what went wrong as a small one does."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.errors import DeadlockError, MismatchError, PeerLeftError

pytestmark = pytest.mark.slow
MANY = 128


@pytest.fixture(scope="module")
def world():
    with bf.local_world(MANY, timeout=120.0) as made:
        yield made


def test_collectives_of_many_ranks(world):
    """Each rank gets what all have given, and the world can be used again after it."""

    def run():
        bf.barrier()
        own = torch.full((1024,), float(bf.rank()))
        return bf.allreduce(own, average=False).unique().tolist()

    for _ in range(2):
        assert world.run(run) == [[MANY * (MANY - 1) / 2]] * MANY


def test_averages_of_many_ranks(world):
    """One-peer averages of a power of two ranks are exact after log2(n) rounds, again and again."""

    def run():
        bf.set_topology(topology.one_peer_exponential(MANY))
        means = []
        for repeat in range(3):
            value = torch.full((1024,), float(bf.rank() + repeat))
            for _ in range(MANY.bit_length() - 1):
                value = bf.neighbor_allreduce(value, name="mean")
            means.append(value.unique().tolist())
        return means

    mean = (MANY - 1) / 2
    assert world.run(run) == [[[mean], [mean + 1], [mean + 2]]] * MANY


def test_a_rank_that_raises_releases_all(world):
    """Ranks that wait for one that has failed are told of it, not left to the deadline."""

    def run():
        if bf.rank() == 17:
            raise ValueError("no data")
        with pytest.raises(PeerLeftError, match=r"rank 17 has left \(it raised ValueError"):
            bf.neighbor_allreduce(
                torch.zeros(4),
                name="all wait for one",
                self_weight=0.5,
                src_weights={17: 0.5},
                dst_weights={},
            )

    with pytest.raises(bf.RankError, match="rank 17 raised ValueError: no data") as caught:
        world.run(run)
    assert caught.value.rank == 17
    assert "then also" not in str(caught.value)


def test_a_rank_that_ends_early_is_named():
    """A rank that has returned is named by those that need it in a collective."""

    def run():
        if bf.rank() == 5:
            return
        bf.barrier()

    with (
        bf.local_world(MANY, timeout=120.0) as world,
        pytest.raises(bf.RankError, match=r"rank 5 has left \(its function has returned\)"),
    ):
        world.run(run)


def test_a_mismatch_is_named():
    """One of many ranks calls another collective: all fail, and a message has both."""

    def run():
        if bf.rank() == 100:
            bf.allreduce(torch.zeros(3))
        else:
            bf.barrier()

    with bf.local_world(MANY, timeout=120.0) as world, pytest.raises(bf.RankError) as caught:
        world.run(run)
    assert isinstance(caught.value.__cause__, MismatchError)
    assert "barrier" in str(caught.value)
    assert "allreduce" in str(caught.value)


def test_two_halves_that_wait_for_each_other_are_found():
    """Each rank of one half waits for the whole other half, and probes only some of it."""

    def run():
        half = MANY // 2
        if bf.rank() < half:
            bf.barrier()
        else:
            bf.neighbor_allreduce(
                torch.zeros(4),
                name="cross",
                self_weight=0.5,
                src_weights={bf.rank() - half: 0.5},
                dst_weights={},
            )

    with bf.local_world(MANY, timeout=120.0) as world, pytest.raises(bf.RankError) as caught:
        world.run(run)
    assert isinstance(caught.value.__cause__, DeadlockError)
