"""``alltoall``: rank r gets the rows that each rank has for r, in the order of the ranks."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.tensors.dtypes import DTYPES
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import held

PARTS: list[tuple[int, ...]] = [(0,), (1,), (5, 3), (2, 0), (30_001,)]
"""Shapes of what one rank sends another: nothing, what goes in a message, and bulk."""


def for_rank(target, source, part, dtype, n):
    """The rows that one rank has for another."""
    rows = part[0]
    return held(source, (n * rows, *part[1:]), dtype)[target * rows : (target + 1) * rows]


def exchanges(dtype, ranks=None):
    group = None if ranks is None else bf.new_group(ranks)
    ranks = list(range(bf.size()) if ranks is None else ranks)
    if bf.rank() not in ranks:
        return
    index, n = ranks.index(bf.rank()), len(ranks)
    for part in PARTS:
        x = held(bf.rank(), (n * part[0], *part[1:]), dtype)
        expected = torch.cat([for_rank(index, source, part, dtype, n) for source in ranks])
        got = bf.alltoall(x, group=group)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        assert torch.equal(x, held(bf.rank(), x.shape, dtype)), "the input was changed"
        assert bf.alltoall_(x, group=group) is x
        assert torch.equal(x, expected)


@each("dtype", list(DTYPES))
def test_equal_parts_of_every_dtype(world, dtype):
    """Part s of rank r becomes part r of rank s, new or in place."""
    world.run(exchanges, dtype)


@on("loopback-4", "shared_memory-4", "mpi-4")
def test_equal_parts_within_a_group(world):
    """Among three of four ranks."""
    world.run(exchanges, torch.float32, [0, 2, 3])


def rows_between(source, target):
    """How many rows go from one rank to another: none, few or many."""
    return (source * 3 + target * target) % 4 * (20_000 if source == target + 1 else 1)


@on_each_rank
@each("dtype", [torch.float32, torch.uint8, torch.bool])
def test_as_many_rows_for_each_rank_as_the_splits_say(dtype):
    """None too; who receives need not know, and is told by an alltoall of the splits."""
    rank, ranks = bf.rank(), range(bf.size())
    sent = [rows_between(rank, target) for target in ranks]
    came = [rows_between(source, rank) for source in ranks]

    def of(source, target):
        return held(source, (rows_between(source, target), 2), dtype, seed=target)

    x = torch.cat([of(rank, target) for target in ranks])
    expected = torch.cat([of(source, rank) for source in ranks])
    assert torch.equal(bf.alltoall(x, sent), expected)
    assert torch.equal(bf.alltoall(x, torch.tensor(sent), tuple(came)), expected)
    out = torch.full((2, sum(came)), float("nan"), dtype=torch.float64).t()
    assert bf.alltoall(x, sent, came, out=out) is out
    assert torch.equal(out, expected.to(torch.float64))
    told = bf.alltoall(torch.tensor(sent))
    assert told.tolist() == came


# mistakes


def told_by(call, kind=bf.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def wrong_arguments():
    x = torch.ones(3, 2)
    found = [
        told_by(lambda: bf.alltoall(torch.tensor(1.0))),
        told_by(lambda: bf.alltoall(x)),
        told_by(lambda: bf.alltoall(x, [1, 1])),
        told_by(lambda: bf.alltoall(x, [4, -1])),
        told_by(lambda: bf.alltoall(x, [1.0, 2.0])),
        told_by(lambda: bf.alltoall(x, [1, 2], [3])),
        told_by(lambda: bf.alltoall(x, [1, 2], out=x)),
        told_by(lambda: bf.alltoall(torch.ones(4), out=torch.ones(2, 2))),
        told_by(lambda: bf.alltoall_(x, [1, 2], [1, 1])),
    ]
    assert bf.alltoall(torch.ones(2)).tolist() == [1.0, 1.0]
    return found


@on("loopback-2", "mpi-2")
def test_wrong_arguments_are_refused_in_a_sentence(world):
    """On the rank that gives them, before anything is sent, so that the next call works."""
    numbers = "expected 2 numbers of rows, one for each rank"
    first, second = world.run(wrong_arguments)
    assert first == second
    for told, expected in zip(
        first,
        [
            "alltoall: argument tensor: expected at least 1 dimension, got a 0-dim tensor; call ",
            "alltoall: argument tensor: expected a first dimension that 2 ranks can share equally, "
            "got 3; append 1 rows, or say with splits= how many go to each rank",
            f"alltoall: argument splits: {numbers} that sum to 3, the rows of the tensor, got [1, ",
            f"alltoall: argument splits: {numbers} that sum to 3, the rows of the tensor, got [4, ",
            f"alltoall: argument splits: {numbers} that sum to 3, the rows of the tensor, got [1.0",
            f"alltoall: argument receive_splits: {numbers}, got [3]",
            "alltoall: arguments splits, out: expected receive_splits= with both, since the ",
            "alltoall: argument out: expected shape (4,), got (2, 2); pass torch.empty((4,)), or ",
            "alltoall: argument out: expected shape (2, 2), got (3, 2); pass torch.empty((2, 2))",
        ],
        strict=True,
    ):
        assert told.startswith(expected), told
