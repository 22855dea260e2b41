"""``gather`` puts all ranks' rows together on the root, and ``scatter`` shares the root's."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.tensors.dtypes import DTYPES
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import held

LENGTHS = [(17, 32, 81, 12), (0, 3, 0, 0), (0, 0, 0, 0), (1, 30_000, 2, 1)]
"""Rows of each rank."""


def members(ranks):
    group = None if ranks is None else bf.new_group(ranks)
    return group, list(range(bf.size()) if ranks is None else ranks)


def gathers(dtype, some=None):
    group, ranks = members(some)
    for number, lengths in enumerate(LENGTHS if bf.rank() in ranks else ()):
        for trailing in ((), (2,)):
            root = ranks[number % len(ranks)]
            parts = [held(r, (lengths[r], *trailing), dtype) for r in ranks]
            x = held(bf.rank(), (lengths[bf.rank()], *trailing), dtype)
            for got in (
                bf.gather(x, root, group=group),
                bf.gather_nonblocking(x, root, group=group).wait(),
            ):
                if bf.rank() == root:
                    assert got.dtype == dtype
                    assert torch.equal(got, torch.cat(parts))
                else:
                    assert got is None


@each("dtype", list(DTYPES))
def test_gather_joins_unequal_rows_on_the_root(world, dtype):
    """In the order of the ranks; the others get None."""
    world.run(gathers, dtype)


def scatters(dtype, some=None):
    group, ranks = members(some)
    for number, lengths in enumerate(LENGTHS if bf.rank() in ranks else ()):
        root, index = ranks[number % len(ranks)], ranks.index(bf.rank())
        splits = [lengths[r] for r in ranks]
        for trailing in ((), (2,)):
            whole = held(root, (sum(splits), *trailing), dtype)
            mine = torch.split(whole, splits)[index]
            given = whole if bf.rank() == root else None
            got = bf.scatter(given, root, splits, group=group)
            assert got.dtype == dtype
            assert torch.equal(got, mine)
            got.fill_(0)
            assert torch.equal(whole, held(root, whole.shape, dtype)), "a part is not its own"
            out = torch.full_like(mine, 1)
            assert bf.scatter(given, root, splits, group=group, out=out) is out
            assert torch.equal(out, mine)
            equal = held(root, (3 * len(ranks), *trailing), dtype)
            got = bf.scatter_nonblocking(equal, root, group=group).wait()
            assert torch.equal(got, equal[3 * index : 3 * index + 3])


@each("dtype", list(DTYPES))
def test_scatter_shares_the_rows_of_the_root(world, dtype):
    """In equal parts or by splits; only the root's tensor counts, which may be None elsewhere."""
    world.run(scatters, dtype)


@on("loopback-4", "shared_memory-4", "mpi-4")
def test_both_within_a_group(world):
    """Among three of four ranks."""
    world.run(gathers, torch.float32, [0, 2, 3])
    world.run(scatters, torch.float32, [0, 2, 3])


@on_each_rank
def test_gathering_what_was_scattered_gives_it_back():
    """On another rank."""
    x = held(bf.rank(), (2 * bf.size(), 3), torch.float64)
    whole = bf.gather(bf.scatter(x, bf.size() - 1), 0)
    if bf.rank() == 0:
        assert torch.equal(whole, held(bf.size() - 1, whole.shape, torch.float64))


# mistakes


def told_by(call, kind=bf.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def wrong_arguments():
    if bf.rank() == 0:
        assert told_by(lambda: bf.scatter(None)) == (
            "scatter: argument tensor: expected the tensor to cut on rank 0, which is the root, "
            "got None"
        )
        assert "that 2 ranks can share equally, got 3; append 1 rows" in told_by(
            lambda: bf.scatter(torch.ones(3))
        )
        assert "argument splits: expected 2 numbers" in told_by(
            lambda: bf.scatter(torch.ones(3), 0, [1, 1])
        )
        assert "argument out: expected shape (1,), got (2,)" in told_by(
            lambda: bf.scatter(torch.ones(3), 0, [1, 2], out=torch.ones(2))
        )
    assert "argument root_rank: expected a rank in 0..1, got 2" in told_by(
        lambda: bf.gather(torch.ones(3), 2)
    )
    assert "gather: argument tensor: expected at least 1 dimension" in told_by(
        lambda: bf.gather(torch.tensor(1.0))
    )
    return bf.scatter(torch.ones(2) if bf.rank() == 0 else None).item()


@on("loopback-2", "mpi-2")
def test_wrong_arguments_are_refused_in_a_sentence(world):
    """On the rank that gives them, before anything is sent, so that the next call works."""
    assert world.run(wrong_arguments) == [1.0, 1.0]


def root_has_left():
    if bf.rank() == 1:
        return None
    return told_by(lambda: bf.scatter(None, 1), bf.PeerLeftError)


@on("loopback-4", "mpi-4")
def test_a_root_that_has_left_is_told_of(world):
    """The others raise PeerLeftError in the very call."""
    told = world.run(root_has_left)
    for rank in (0, 2, 3):
        assert "rank 1 has left (" in told[rank]
