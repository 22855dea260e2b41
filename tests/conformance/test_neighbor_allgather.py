"""``neighbor_allgather``: the in-neighbours' rows, in order, this rank's not among them."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.tensors.dtypes import DTYPES
from tests.support import OF_SEVERAL, LoopbackWorld, on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import FAMILIES, family, held

SEVERAL = on(*OF_SEVERAL)
LENGTHS = (17, 32, 0, 12, 15, 23, 22, 3)


def joined(ranks, of):
    mine = of(bf.rank())
    return torch.cat([mine[:0], *(of(rank) for rank in ranks)])


def gathers(dtype):
    bf.set_topology(topology.ring(bf.size()))
    for trailing in ((), (3,), (2, 0), (9_000,)):

        def of(rank, trailing=trailing):
            return held(rank, (LENGTHS[rank], *trailing), dtype)

        got = bf.neighbor_allgather(of(bf.rank()))
        assert got.dtype == dtype
        assert torch.equal(got, joined(bf.in_neighbor_ranks(), of))


@on("loopback-2")
@on_each_rank
def test_ranks_may_be_arrays():
    """src_ranks and dst_ranks may be numpy arrays, of which one may be empty.

    Ranks as numpy gives them, an empty array among them.
    """
    me, peer = bf.rank(), 1 - bf.rank()
    ranks = np.array([peer])
    for sources, targets in ((ranks, ranks), (ranks[me:], ranks[peer:])):
        got = bf.neighbor_allgather(torch.tensor([me]), src_ranks=sources, dst_ranks=targets)
        assert got.tolist() == sources.tolist()


@each("dtype", list(DTYPES))
def test_every_dtype_with_rows_in_unequal_numbers(world, dtype):
    """Also no rows at all, and rows that travel in bulk."""
    world.run(gathers, dtype)


def follows(name):
    chosen = family(name, bf.size())
    if chosen is None:
        return False
    bf.set_topology(chosen)
    for k in range(4):
        sources = bf.in_neighbor_ranks(k)
        assert sources == sorted(sources)
        got = bf.neighbor_allgather(torch.tensor([[bf.rank(), k]]))
        assert got.tolist() == [[source, k] for source in sources]
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_is_that_of_the_in_neighbours(name):
    """In each round of a graph or schedule, rows come in ascending order of their ranks."""
    existed = [all(LoopbackWorld(n).run(follows, name)) for n in (1, 4, 6)]
    assert any(existed)


def permuted(seed):
    """Everybody sends to everybody; each rank wants another order."""
    others = [rank for rank in range(bf.size()) if rank != bf.rank()]
    order = random.Random(100 * seed + bf.rank()).sample(others, len(others))

    def of(rank):
        return held(rank, (LENGTHS[rank], 2), torch.float32)

    got = bf.neighbor_allgather(of(bf.rank()), src_ranks=order, dst_ranks=others)
    assert torch.equal(got, joined(order, of))
    return order


@SEVERAL
def test_given_sources_come_in_the_order_given(world):
    """Rows come in the order of src_ranks, which each rank may choose for itself."""
    orders = [world.run(permuted, seed)[0] for seed in range(4)]
    assert world.size == 2 or any(order != sorted(order) for order in orders)


def one_way():
    """Rank 0 sends to rank 1; nobody else does anything."""
    sources, targets = {0: ([], [1]), 1: ([0], [])}.get(bf.rank(), ([], []))
    x = torch.full((2, 3), bf.rank())
    got = bf.neighbor_allgather(x, src_ranks=sources, dst_ranks=targets)
    return tuple(got.shape), got.sum().item()


@SEVERAL
def test_without_sources_the_result_has_no_rows(world):
    """A rank that receives from nobody gets 0 rows of its own tensor's trailing shape."""
    shapes = world.run(one_way)
    assert shapes == [((2, 3) if rank == 1 else (0, 3), 0) for rank in range(world.size)]


def wrong_arguments():
    told = []
    for arguments in (
        {"src_ranks": [1]},
        {"src_ranks": [0], "dst_ranks": []},
        {"src_ranks": [], "dst_ranks": [5]},
        {"src_ranks": [1, 1], "dst_ranks": []},
    ):
        if bf.rank() == 0:
            with pytest.raises(bf.ArgumentError) as caught:
                bf.neighbor_allgather(torch.ones(1), **arguments)
            told.append(str(caught.value))
    with pytest.raises(bf.ArgumentError, match="neighbor_allgather: argument tensor: expected at"):
        bf.neighbor_allgather(torch.tensor(1.0))
    return told


@on("loopback-2")
def test_wrong_arguments_are_told(world):
    """One list without the other, this rank, an unknown or a repeated one: ArgumentError."""
    assert world.run(wrong_arguments)[0] == [
        "neighbor_allgather: arguments src_ranks, dst_ranks: expected both or neither",
        "neighbor_allgather: argument src_ranks: expected a rank in 0..1 other than 0, this rank "
        "itself, got 0",
        "neighbor_allgather: argument dst_ranks: expected a rank in 0..1 other than 0, this rank "
        "itself, got 5",
        "neighbor_allgather: argument src_ranks: expected each rank once, got [1, 1]",
    ]


def length(rank, step):
    """Rows of a rank: mostly as before, at times others, none, or more than a chunk."""
    return random.Random(f"{rank} {step // 4}").choice((2, 2, 2, 5, 0, 70_000))


def repeats(late):
    """Over a ring, where each rank has rows in numbers of its own, which change now and then."""
    bf.set_topology(topology.ring(bf.size()))
    for step in range(48):
        if step == late and bf.rank() == bf.size() - 1:
            time.sleep(0.3)
        mine = held(bf.rank(), (length(bf.rank(), step), 3), torch.float32) + step
        if (bf.rank() + step) % 7 == 0:
            got = bf.neighbor_allgather_nonblocking(mine).wait()
        else:
            got = bf.neighbor_allgather(mine)

        def of(rank, step=step):
            return held(rank, (length(rank, step), 3), torch.float32) + step

        assert torch.equal(got, joined(bf.in_neighbor_ranks(), of)), step
    return [key[0] for key in bf.current().engine.fast_paths]


@SEVERAL
@pytest.mark.parametrize("late", [10, 11])
def test_repeated_calls_give_what_the_first_gives(world, late):
    """Also where a neighbour is late, or comes with other numbers of rows than before."""
    paths = world.run(repeats, late)
    if "shared_memory" in world.transport:
        assert any("neighbor_allgather" in found for found in paths)


def goes_wrong_after_repeats(kind):
    bf.set_topology(topology.ring(bf.size()))
    for _ in range(6):
        bf.neighbor_allgather(torch.ones(2, 3))
    if bf.rank() != 0:
        bf.neighbor_allgather(torch.ones(2, 3))
    elif kind == "shape":
        bf.neighbor_allgather(torch.ones(2, 4))
    elif kind == "dtype":
        bf.neighbor_allgather(torch.ones(2, 3, dtype=torch.int32))
    else:
        bf.neighbor_allreduce(torch.ones(2, 3), name="neighbor_allgather.noname")


@on("shared_memory-2", "shared_memory-4", "mpi-2")
@pytest.mark.parametrize("kind", ["shape", "dtype", "verb"])
def test_a_mismatch_after_repeated_calls_is_told(world, kind):
    """To the rank that differs and to its neighbours, with both signatures."""
    found = world.outcomes(goes_wrong_after_repeats, kind)
    near = [one for rank, one in enumerate(found) if rank in (0, 1, world.size - 1)]
    assert {one.error for one in near} == {"MismatchError"}, found
    words = " ".join(str(one.message) for one in near)
    for word in {"shape": ("3", "4"), "dtype": ("float32", "int32")}.get(kind, ("verb",)):
        assert word in words, words
