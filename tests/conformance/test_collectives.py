"""``allreduce``, ``allgather``, ``broadcast``, ``barrier`` and the verbs for objects."""

from __future__ import annotations

import time

import pytest
import torch

import asyncddp as bf
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from tests.support import LoopbackWorld, on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import AVERAGING, SHAPES, check, held, options, summed

ALL = list(DTYPES)
SOME = on("loopback-4", "mpi-2")
LENGTHS = (17, 32, 81, 12, 15, 23, 22)


def holder(shape, dtype, seed=0):
    return lambda rank: held(rank, shape, dtype, seed)


# allreduce


def sums(dtype):
    for seed, shape in enumerate(SHAPES):
        of = holder(shape, dtype, seed)
        x = of(bf.rank())
        check(bf.allreduce(x, average=False), x, summed(range(bf.size()), of))


@each("dtype", ALL)
def test_allreduce_sums_every_dtype_and_shape(world, dtype):
    """Floats within rounding, integers modulo their size, bools by or."""
    world.run(sums, dtype)


def averages(dtype):
    for seed, shape in enumerate(SHAPES):
        of = holder(shape, dtype, seed)
        x = of(bf.rank())
        parts = torch.stack([of(rank) for rank in range(bf.size())])
        wide = torch.complex128 if dtype.is_complex else torch.float64
        check(bf.allreduce(x, **options(dtype)), x, parts.to(wide).mean(dim=0))


@each("dtype", AVERAGING)
def test_allreduce_averages_every_dtype_and_shape(world, dtype):
    """The mean over all ranks has the input's dtype and shape; integers are rounded."""
    world.run(averages, dtype)


@on_each_rank
def test_integer_sums_wrap_around_as_torch_s_do():
    """A sum beyond the range of an integer dtype wraps around, as repeated += does."""
    wraps = {
        torch.uint8: 200,
        torch.int8: 100,
        torch.int16: 30_000,
        torch.int32: 2**31 - 1,
        torch.int64: 2**63 - 1,
    }
    for dtype, value in wraps.items():
        x = torch.full((40,), value, dtype=dtype)
        expected = x.clone()
        for _ in range(bf.size() - 1):
            expected += x
        assert torch.equal(bf.allreduce(x, average=False), expected), dtype


def halves():
    """Partial sums that a half could not hold: float16 in float32, bfloat16 with all its bits."""
    large = torch.tensor([40_000.0 if bf.rank() < 2 else -40_000.0], dtype=torch.float16)
    assert bf.allreduce(large, average=False).item() == 0.0
    small = torch.tensor([256.0 if bf.rank() == 0 else 1.0], dtype=torch.bfloat16)
    assert bf.allreduce(small, average=False).item() == 260.0  # 259 lies between 258 and 260
    return True


@on("loopback-4", "mpi-4")
def test_halves_are_summed_in_float32(world):
    """Partial sums of float16 may exceed its range, those of bfloat16 keep all their bits."""
    assert all(world.run(halves))


@on_each_rank
def test_allreduce_gives_all_ranks_the_same_bits():
    """A float32 average has exactly equal elements on all ranks, rounding included."""
    x = held(bf.rank(), (1000,), torch.float32)
    every = bf.allgather(bf.allreduce(x)[None])
    assert (every == every[0]).all()


@SOME
@on_each_rank
def test_averages_of_integers_and_bools_are_refused_unless_asked_for():
    """allreduce of integers or bools, an average by default, raises ArgumentError."""
    for dtype in ALL:
        if dtype in AVERAGING and not options(dtype):
            continue
        with pytest.raises(bf.ArgumentError, match=r"^allreduce: the average of \w+ values is no"):
            bf.allreduce(torch.ones(2, dtype=dtype))
    assert bf.allreduce(torch.tensor([1.0])).item() == 1.0


# broadcast


def broadcasts(dtype):
    for root in range(bf.size()):
        for seed, shape in enumerate(SHAPES):
            of = holder(shape, dtype, seed)
            x = of(bf.rank())
            check(bf.broadcast(x, root), x, of(root))
            assert bf.broadcast_(x, root) is x
            assert torch.equal(x, of(root))


@each("dtype", ALL)
def test_broadcast_from_every_root_in_every_dtype_and_shape(world, dtype):
    """broadcast returns the root's tensor, and broadcast_ writes it into the argument."""
    world.run(broadcasts, dtype)


# allgather


def gathers(dtype):
    for trailing in ((), (3,), (2, 0)):
        for lengths in (LENGTHS, [2] * 9, [0, 3, 0, 0], [0] * 4):
            x = held(bf.rank(), (lengths[bf.rank()], *trailing), dtype)
            parts = [held(r, (lengths[r], *trailing), dtype) for r in range(bf.size())]
            got = bf.allgather(x)
            assert got.dtype == dtype
            assert torch.equal(got, torch.cat(parts))


@each("dtype", ALL)
def test_allgather_joins_unequal_rows_in_the_order_of_ranks(world, dtype):
    """allgather takes any number of rows of each rank, none too, and keeps the dtype."""
    world.run(gathers, dtype)


def scalar_gather():
    with pytest.raises(bf.ArgumentError) as caught:
        bf.allgather(torch.tensor(1.0))
    return str(caught.value)


def test_allgather_refuses_scalars(world):
    """allgather of a 0-dim tensor raises ArgumentError, which advises tensor.reshape(1)."""
    assert (
        world.run(scalar_gather)
        == [
            "allgather: argument tensor: expected at least 1 dimension, got a 0-dim tensor; call "
            "tensor.reshape(1) first"
        ]
        * world.size
    )


# barrier


def meets():
    time.sleep(0.05 * bf.rank())
    entered = time.monotonic()
    bf.barrier()
    return entered, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(world):
    """barrier() returns on no rank before the last rank has called it."""
    entered, left = zip(*world.run(meets), strict=True)
    assert max(entered) <= min(left)


def barrier_beside_others():
    handle = bf.neighbor_allreduce_nonblocking(torch.tensor([float(bf.rank())]), name="kept")
    bf.barrier()
    bf.barrier()
    return handle.wait().item()


@SOME
def test_a_barrier_leaves_what_is_under_way_under_way(world):
    """A non-blocking verb that starts before a barrier gives its result after it."""
    n = world.size
    assert sum(world.run(barrier_beside_others)) == n * (n - 1) / 2


# local


def local_sums():
    of = holder((5,), torch.float64)
    x = of(bf.rank())
    machine = range(bf.machine_rank() * 2, min(bf.machine_rank() * 2 + 2, bf.size()))
    check(bf.local_allreduce(x, average=False), x, summed(machine, of))
    check(bf.local_allreduce(x), x, summed(machine, of) / len(machine))
    y = torch.full((3,), float(bf.rank()))
    assert bf.local_allreduce_(y) is y
    return y[0].item(), bf.local_rank(), bf.local_size()


def test_local_allreduce_stays_inside_the_machine(world):
    """The mean of r over a machine of L ranks is r − local_rank + (L − 1)/2."""
    told = world.run(local_sums, settings={"ranks_per_machine": 2})
    for rank, (mean, local_rank, local_size) in enumerate(told):
        assert mean == rank - local_rank + (local_size - 1) / 2
        assert local_rank == rank % 2


def test_local_allreduce_on_machines_of_unequal_size():
    """The mean is over as many ranks as the machine has, on the smallest machine as well."""
    told = LoopbackWorld(5).run(local_sums, settings={"ranks_per_machine": 2})
    assert [size for _, _, size in told] == [2, 2, 2, 2, 1]


def local_on_one_machine_only():
    """The ranks of machine 0 meet more often among themselves than those of machine 1."""
    for _ in range(3 if bf.machine_rank() == 0 else 1):
        assert bf.local_allreduce(torch.ones(2), average=False).tolist() == [2.0, 2.0]
    return bf.allreduce(torch.tensor([float(bf.rank())]), average=False).item()


@on("loopback-4", "mpi-4")
def test_machines_may_differ_in_how_often_they_meet_inside(world):
    """allreduce is right after machines have called local_allreduce unequally often."""
    told = world.run(local_on_one_machine_only, settings={"ranks_per_machine": 2})
    assert told == [6.0] * 4


# objects


class Thing:
    """Something of a module's own."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Thing) and self.number == other.number

    __hash__ = None


OBJECTS = [None, 0, "text", {"lr": 0.1, "ranks": [0, 1]}, Thing(3), b"", list(range(50_000))]


@on_each_rank
def test_broadcast_object_carries_anything_from_every_root():
    """Every rank gets an object equal to the root's, of any type that pickle takes."""
    for root in range(bf.size()):
        for thing in OBJECTS:
            mine = thing if bf.rank() == root else "not the root's"
            assert bf.broadcast_object(mine, root) == thing
    tensor = bf.broadcast_object({"w": torch.arange(3)} if bf.rank() == 0 else None)
    assert torch.equal(tensor["w"], torch.arange(3))
    assert bf.broadcast_object_nonblocking("x", 0).wait() == "x"


@on_each_rank
def test_allgather_object_gives_all_ranks_all_objects_in_order():
    """Entry r of the list equals rank r's object, also where sizes differ."""
    for thing in OBJECTS:
        assert bf.allgather_object((bf.rank(), thing)) == [(r, thing) for r in range(bf.size())]
    sizes = bf.allgather_object("a" * (1000 * bf.rank()))
    assert [len(text) for text in sizes] == [1000 * r for r in range(bf.size())]
    assert bf.allgather_object_nonblocking(1).wait() == [1] * bf.size()


@SOME
@on_each_rank
def test_gathered_objects_are_shared_with_nobody():
    """Each rank may change all objects that it has gathered; neither givers nor others see it."""
    mine = [bf.rank()]
    every = bf.allgather_object(mine)
    bf.barrier()
    for one in every:
        one.append(f"changed by rank {bf.rank()}")
    bf.barrier()
    assert mine == [bf.rank()]
    assert every == [[rank, f"changed by rank {bf.rank()}"] for rank in range(bf.size())]


# arguments


def wrong_arguments():
    told = []
    for call in (
        lambda: bf.allreduce([1.0]),
        lambda: bf.broadcast(torch.ones(2), bf.size()),
        lambda: bf.broadcast(torch.ones(2), -1),
        lambda: bf.broadcast(torch.ones(2), True),
        lambda: bf.broadcast_object(1, "0"),
        lambda: bf.allreduce(torch.ones(2, 2).to_sparse()),
    ):
        with pytest.raises(bf.ArgumentError) as caught:
            call()
        told.append(str(caught.value))
    with pytest.raises(bf.DtypeError) as caught:
        bf.allreduce(torch.ones(2).to(torch.float8_e5m2), average=False)
    told.append(str(caught.value))
    return told


@on("loopback-2")
def test_wrong_arguments_are_told_with_expected_got_and_remedy(world):
    """The error of a wrong argument names the verb, the argument, and what was expected."""
    known = ", ".join(row.name for row in DTYPES.values())
    assert world.run(wrong_arguments)[0] == [
        "allreduce: argument tensor[0]: expected a torch.Tensor, got float; for other objects use "
        "broadcast_object or allgather_object",
        "broadcast: argument root_rank: expected a rank in 0..1, got 2",
        "broadcast: argument root_rank: expected a rank in 0..1, got -1",
        "broadcast: argument root_rank: expected a rank in 0..1, got True",
        "broadcast_object: argument root_rank: expected a rank in 0..1, got '0'",
        "allreduce: argument tensor: expected a dense tensor, got layout torch.sparse_coo; call "
        "tensor.to_dense() first",
        f"allreduce: argument tensor has dtype torch.float8_e5m2; expected one of {known}. Cast it "
        "first with tensor.to(...).",
    ]


def test_the_table_of_dtypes_is_torch_s_for_the_cpu():
    """Every dtype of the issue's list, each with its own arithmetic."""
    assert {row.name for row in DTYPES.values()} == {
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }
    assert sum(row.kind is DtypeKind.INTEGER for row in DTYPES.values()) == 5
