"""``reduce_scatter``: rank r gets part r of what ``allreduce`` gives all."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.tensors.dtypes import DTYPES
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import AVERAGING, check, held, options, summed
from tests.support.timelines import read, spans

SOME = on("loopback-4", "mpi-2")
PARTS: list[tuple[int, ...]] = [(0,), (1,), (5,), (2, 0), (3, 4), (2, 3, 5), (35_001,)]
"""Shapes of a part: nothing, little, and what goes through shared memory where there is some."""


def whole(part):
    """The shape of a tensor with one part for each rank."""
    return (part[0] * bf.size(), *part[1:])


def mine(tensor):
    """This rank's part."""
    rows = tensor.shape[0] // bf.size()
    return tensor[bf.rank() * rows : (bf.rank() + 1) * rows]


def holder(shape, dtype, seed=0):
    return lambda rank: held(rank, shape, dtype, seed)


# results


def sums(dtype):
    for seed, part in enumerate(PARTS):
        of = holder(whole(part), dtype, seed)
        x = of(bf.rank())
        got = bf.reduce_scatter(x, average=False)
        check(got, mine(x), mine(summed(range(bf.size()), of)))
        assert torch.equal(x, of(bf.rank())), "the input was changed"


@each("dtype", list(DTYPES))
def test_sums_of_every_dtype_and_shape(world, dtype):
    """Floats within rounding, integers modulo their size, bools by or."""
    world.run(sums, dtype)


def averages(dtype):
    for seed, part in enumerate(PARTS):
        of = holder(whole(part), dtype, seed)
        x = of(bf.rank())
        wide = torch.complex128 if dtype.is_complex else torch.float64
        mean = torch.stack([of(rank) for rank in range(bf.size())]).to(wide).mean(dim=0)
        check(bf.reduce_scatter(x, **options(dtype)), mine(x), mine(mean))


@each("dtype", AVERAGING)
def test_averages_of_every_dtype_and_shape(world, dtype):
    """Rank r gets part r of the mean in the input's dtype; integers are rounded."""
    world.run(averages, dtype)


def rounds_half_to_even():
    x = torch.tensor([0, 2, -2, 6] if bf.rank() == 0 else [1, 3, -1, 7])
    return bf.reduce_scatter(x, round_integers=True).tolist()


@on("loopback-2", "mpi-2")
def test_integers_are_rounded_half_to_even(world):
    """0.5 and 2.5 become 0 and 2; -1.5 and 6.5 become -2 and 6."""
    assert world.run(rounds_half_to_even) == [[0, 2], [-2, 6]]


def halves():
    """Partial sums that a half could not hold: float16 in float32, bfloat16 with all its bits."""
    large = torch.full((4,), 40_000.0 if bf.rank() < 2 else -40_000.0, dtype=torch.float16)
    assert bf.reduce_scatter(large, average=False).item() == 0.0
    small = torch.full((4,), 256.0 if bf.rank() == 0 else 1.0, dtype=torch.bfloat16)
    assert bf.reduce_scatter(small, average=False).item() == 260.0  # 259 lies between 258 and 260
    return True


@on("loopback-4", "mpi-4")
def test_halves_are_summed_in_float32(world):
    """Partial sums of float16 may exceed its range, those of bfloat16 keep all their bits."""
    assert all(world.run(halves))


@on_each_rank
def test_gathering_the_parts_gives_the_allreduce():
    """allgather of what reduce_scatter gives equals allreduce, within rounding."""
    x = held(bf.rank(), whole((2, 3)), torch.float64)
    torch.testing.assert_close(bf.allgather(bf.reduce_scatter(x)), bf.allreduce(x))


# where the result goes


def into_out():
    x = held(bf.rank(), whole((2, 3)), torch.float32)
    expected = bf.reduce_scatter(x)
    fitting = torch.full((2, 3), float("nan"))
    other_dtype = torch.full((2, 3), float("nan"), dtype=torch.float64)
    strided = torch.full((3, 2), float("nan")).t()
    for out in (fitting, other_dtype, strided):
        assert bf.reduce_scatter(x, out=out) is out
        torch.testing.assert_close(out, expected.to(out.dtype), rtol=0, atol=0)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert bf.reduce_scatter(x, out=parameter) is parameter
    assert torch.equal(parameter.detach(), expected)


def test_the_result_can_be_written_into_a_tensor_of_the_caller(world):
    """out= is returned; it may have another dtype, be strided, or be a parameter."""
    world.run(into_out)


def into_itself():
    """Each rank writes over a part of what others still read."""
    for start in range(bf.size()):
        x = held(bf.rank(), whole((30_000,)), torch.float32)
        expected = bf.reduce_scatter(x)
        out = x[start * 30_000 : (start + 1) * 30_000]
        bf.reduce_scatter(x, out=out)
        assert torch.equal(out, expected)


def test_the_result_may_replace_any_part_of_the_tensor(world):
    """out= may be a slice of the argument, also one that is another rank's part."""
    world.run(into_itself)


# mistakes


def told_by(call):
    with pytest.raises(bf.ArgumentError) as caught:
        call()
    return str(caught.value)


def wrong_arguments():
    found = [
        told_by(lambda: bf.reduce_scatter(torch.tensor(1.0))),
        told_by(lambda: bf.reduce_scatter(torch.ones(6, 3))),
        told_by(lambda: bf.reduce_scatter_nonblocking(torch.ones(1))),
        told_by(lambda: bf.reduce_scatter(torch.ones(8, 3), out=torch.ones(8, 3))),
        told_by(lambda: bf.reduce_scatter(torch.ones(4, dtype=torch.int32))),
        told_by(lambda: bf.reduce_scatter([1.0])),
    ]
    assert bf.reduce_scatter(torch.ones(4)).tolist() == [1.0]
    return found


@on("loopback-4", "mpi-4")
def test_wrong_arguments_are_refused_in_a_sentence(world):
    """On the rank that gives them, before anything is sent, so that the next call works."""
    first, *rest = world.run(wrong_arguments)
    assert rest == [first] * (world.size - 1)
    scalar, six, one, out, integers, no_tensor = first
    assert scalar == (
        "reduce_scatter: argument tensor: expected at least 1 dimension, got a 0-dim tensor; call "
        "tensor.reshape(1) first"
    )
    shared = "reduce_scatter: argument tensor: expected a first dimension that 4 ranks can share "
    assert six.startswith(shared + "equally, got shape (6, 3); append 2 rows,")
    assert one.startswith(shared + "equally, got shape (1,); append 3 rows,")
    assert out == (
        "reduce_scatter: argument out: expected shape (2, 3), the part of one of 4 ranks, got "
        "(8, 3); pass torch.empty((2, 3)), or leave out= away"
    )
    assert integers.startswith("reduce_scatter: the average of int32 values is no int32; pass ")
    assert no_tensor.startswith("reduce_scatter: argument tensor[0]: expected a torch.Tensor, got ")


# the timeline


def recorded():
    bf.reduce_scatter(torch.ones(4, 3), name="part")


@SOME
def test_the_timeline_tells_what_was_exchanged(world, tmp_path):
    """A collective of 12 numbers of four bytes, on each rank."""
    world.run(recorded, settings={"timeline": f"{tmp_path}/"})
    for rank in range(world.size):
        collectives = spans(read(tmp_path / f"rank{rank}.json"), "collective")
        found = [span["args"] for span in collectives if span["args"]["verb"] == "reduce_scatter"]
        assert [(args["bytes"], args["ranks"]) for args in found] == [(48, world.size)]
