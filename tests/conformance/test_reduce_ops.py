"""``op=`` of ``allreduce``, ``reduce`` and ``reduce_scatter``, over all ranks and over groups."""

from __future__ import annotations

import functools

import pytest
import torch

import asyncddp as bf
from asyncddp.ops.reduce_op import ReduceOp
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from tests.support import on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import check, held, options

ALL = list(DTYPES)
SHAPES: list[tuple[int, ...]] = [(0, 3), (4,), (12, 5), (70_004,)]
"""Nothing, what goes whole to all ranks, and what each rank reduces a part of."""


def fitting(dtype):
    """The operators that a dtype has."""
    kind = DTYPES[dtype].kind
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if kind is not DtypeKind.BOOL:
        ops.append(ReduceOp.AVERAGE)
    if kind is not DtypeKind.COMPLEX:
        ops += [ReduceOp.MIN, ReduceOp.MAX]
    if kind in (DtypeKind.BOOL, DtypeKind.INTEGER):
        ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return ops


def reduced(op, ranks, of):
    """What a reduction must give: in double precision, or modulo the size of integers."""
    parts = torch.stack([of(rank) for rank in ranks])
    dtype, kind = parts.dtype, DTYPES[parts.dtype].kind
    wide = {DtypeKind.COMPLEX: torch.complex128, DtypeKind.FLOAT: torch.float64}.get(kind)
    if op is ReduceOp.AVERAGE:
        return parts.to(wide or torch.float64).mean(dim=0)
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        if kind is DtypeKind.BOOL:
            return parts.any(dim=0) if op is ReduceOp.SUM else parts.all(dim=0)
        total = parts.sum if op is ReduceOp.SUM else parts.prod
        return total(dim=0, dtype=wide or dtype)
    pairwise = {
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    return functools.reduce(pairwise, parts)


def more(op, dtype):
    return options(dtype) if op is ReduceOp.AVERAGE else {}


def reduces(dtype, ranks, **group):
    """All three verbs in all operators and shapes; on root r, which each rank is once."""
    index = list(ranks).index(bf.rank())
    for number, shape in enumerate(SHAPES):
        shape = (shape[0] // 4 * len(ranks), *shape[1:])
        rows = shape[0] // len(ranks)
        mine = slice(index * rows, (index + 1) * rows)
        for seed, op in enumerate(fitting(dtype)):
            of = functools.partial(held, shape=shape, dtype=dtype, seed=seed)
            x, given = of(bf.rank()), {"op": op, **more(op, dtype), **group}
            expected = reduced(op, ranks, of)
            check(bf.allreduce(x, **given), x, expected)
            check(bf.reduce_scatter(x, **given), x[mine], expected[mine])
            root = ranks[(seed + number) % len(ranks)]
            got = bf.reduce(x, root, **given)
            assert (got is not None) == (bf.rank() == root)
            if got is not None:
                check(got, x, expected)
            assert torch.equal(x, of(bf.rank())), "the input was changed"


def over_all(dtype):
    reduces(dtype, range(bf.size()))


@each("dtype", ALL)
def test_every_operator_that_a_dtype_has(world, dtype):
    """Floats within rounding, integers modulo their size, bools by logic."""
    world.run(over_all, dtype)


def over_group(dtype):
    ranks = [0, *range(2, bf.size())]
    group = bf.new_group(ranks)
    if bf.rank() in ranks:
        reduces(dtype, ranks, group=group)


@on("loopback-4")
@each("dtype", ALL)
def test_every_operator_over_three_of_four_ranks(world, dtype):
    """The same within a group, whose parts of a tensor have unequal lengths."""
    world.run(over_group, dtype)


def names():
    x = torch.tensor([float(bf.rank() + 1)])
    n = bf.size()
    mean = (n + 1) / 2
    product = 1.0
    for rank in range(n):
        product *= rank + 1
    expected = {"sum": n * mean, "average": mean, "avg": mean, "min": 1.0, "max": float(n)}
    for name, value in {**expected, "product": product}.items():
        assert bf.allreduce(x, op=name).item() == value
        assert bf.allreduce(x, op=ReduceOp[name.upper()]).item() == value
        assert bf.local_allreduce(x, op=name).item() == value
        y = x.clone()
        assert bf.allreduce_(y, op=name) is y
        assert y.item() == value
    assert bf.allreduce(x, average=True, op="average").item() == mean
    assert bf.allreduce(x, average=False, op="sum").item() == n * mean
    assert bf.allreduce(x, average=False, op="max").item() == n
    assert ReduceOp.AVG is ReduceOp.AVERAGE


def test_operators_have_names(world):
    """A name stands for its member of ReduceOp; average= may say the same."""
    world.run(names)


HUGE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@on("loopback-4", "mpi-2")
@on_each_rank
@each("dtype", HUGE)
def test_the_mean_of_equal_huge_values_is_that_value(dtype):
    """A mask of the smallest number stays one: a mean is not divided after its sum is infinite.

    All verbs that average, of equal tensors of the largest number, in all sizes.
    """
    n = bf.size()
    group = bf.new_group(range(min(3, n)))
    for count in (4, 20_004, 400_008):
        x = torch.full((n * count,), torch.finfo(dtype).min, dtype=dtype)
        means = [
            bf.allreduce(x),
            bf.allreduce_(x.clone()),
            bf.allreduce([x, x[:4]])[0],
            bf.hierarchical_allreduce(x),
            bf.local_allreduce(x),
            bf.neighbor_allreduce(x),
        ]
        part, root = bf.reduce_scatter(x), bf.reduce(x, 0)
        encoded = torch.full((n * count,), -(2.0**127))
        assert torch.equal(bf.allreduce(encoded, compression="bf16"), encoded)
        if bf.rank() in group.ranks:
            means.append(bf.allreduce(x, group=group))
        for number, mean in enumerate(means):
            assert torch.equal(mean, x), (number, count, mean)
        assert torch.equal(part, x[:count])
        assert root is None or torch.equal(root, x)


@on_each_rank
def test_averaged_models_keep_masks():
    """In ``average_model`` and ``allreduce_parameters``."""
    mask = torch.full((300, 300), torch.finfo(torch.float32).min)
    model = torch.nn.Linear(3, 3)
    model.register_buffer("mask", mask.clone())
    model.register_buffer("halves", torch.full((5,), -65504.0, dtype=torch.float16))
    bf.average_model(model)
    assert torch.equal(model.mask, mask)
    assert (model.halves == -65504.0).all()
    parameters = {"mask": mask.clone()}
    bf.allreduce_parameters(parameters)
    assert torch.equal(parameters["mask"], mask)


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("machine", [1, 2, 3])
def test_between_machines_no_sum_overflows(machine, compression):
    """Neither that of a machine, nor what it sends encoded to the others."""
    value = -65504.0 if compression else torch.finfo(torch.float32).min

    def means():
        x = torch.full((50_001,), value)
        got = bf.hierarchical_allreduce(x, compression=compression)
        return torch.equal(got, x)

    with bf.local_world(6, ranks_per_machine=machine) as several:
        assert all(several.run(means))


@on("loopback-4", "mpi-2", "mpi-4")
@on_each_rank
def test_all_ranks_get_the_same_bits():
    """Of an operator that no transport computes, rounding included."""
    x = torch.randn(5_000, generator=torch.Generator().manual_seed(bf.rank()))
    for op in ("product", "sum"):
        every = bf.allgather(bf.allreduce(x, op=op, group=bf.new_group())[None])
        assert (every == every[0]).all()


@on("loopback-4", "mpi-4")
@on_each_rank
def test_halves_are_reduced_in_float32():
    """Partial sums and products of float16 may exceed its range."""
    x = torch.tensor([300.0, 40_000.0 if bf.rank() < 2 else -40_000.0], dtype=torch.float16)
    total = bf.allreduce(x, op="sum", group=bf.new_group())
    assert total.tolist() == [1200.0, 0.0]
    y = torch.tensor([300.0 if bf.rank() < 2 else 1 / 300], dtype=torch.float16)
    assert abs(bf.allreduce(y, op="product").item() - 1.0) < 0.01


@on("loopback-2", "mpi-4")
@on_each_rank
def test_nan_is_told():
    """One rank's NaN is the minimum and the maximum, as it is torch's."""
    x = torch.tensor([float("nan") if bf.rank() == 1 else 1.0, 2.0])
    for op in ("min", "max"):
        got = bf.allreduce(x, op=op)
        assert torch.isnan(got[0])
        assert got[1] == 2.0


# arguments


def told_by(call, kind=bf.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@on("loopback-1", "loopback-2", "mpi-2")
@on_each_rank
def test_wrong_operators_are_refused_in_a_sentence():
    """On the rank that gives them, before anything is sent, so that the next call works."""
    x = torch.ones(4)
    assert told_by(lambda: bf.allreduce(x, average=True, op="sum")) == (
        "allreduce: arguments op, average: expected no contradiction, got op='sum' and "
        "average=True; leave average= away"
    )
    assert "op='average' and average=False" in told_by(
        lambda: bf.reduce_scatter(x, False, op=ReduceOp.AVG)
    )
    assert told_by(lambda: bf.allreduce(x, op="maximum"), bf.UnknownNameError) == (
        "allreduce: argument op: unknown operator 'maximum'; known are: sum, average, avg, "
        "product, min, max, band, and, bor, or, bxor, xor. Did you mean 'max'?"
    )
    assert "Did you mean 'product'?" in told_by(lambda: bf.reduce(x, 0, "prodcut"))
    assert told_by(lambda: bf.reduce(x, 0, 3)) == (
        "reduce: argument op: expected a ReduceOp or the name of one, got 3"
    )
    assert told_by(lambda: bf.allreduce(x, op="bxor")).startswith(
        "allreduce: argument op: there is no bxor of float32 values; "
    )
    assert "no max of complex64" in told_by(lambda: bf.reduce(x.to(torch.complex64), 0, "max"))
    for op in ("average", "avg"):
        told = told_by(lambda op=op: bf.allreduce(torch.ones(4, dtype=torch.int32), op=op))
        assert told.startswith("allreduce: the average of int32 values is no int32; ")
    assert told_by(lambda: bf.allreduce(x, op="max", compression="fp16")) == (
        "allreduce: arguments op, compression: expected a sum or an average of what travels "
        "encoded, got op='max'; leave compression= away"
    )
    assert "root_rank: expected a rank in 0.." in told_by(lambda: bf.reduce(x, bf.size()))
    assert bf.allreduce(x, op="max").tolist() == [1.0] * 4


def named_bitwise():
    x = torch.tensor([bf.rank() | 4])
    names = {"and": "band", "or": "bor", "xor": "bxor"}
    found = [[bf.allreduce(x, op=op).item() for op in pair] for pair in names.items()]
    some = torch.tensor([bf.rank() == 1, True])
    assert bf.allreduce(some, op="and").tolist() == [False, True]
    assert bf.allreduce(some, op="or").tolist() == [True, True]
    return found


@on("loopback-4", "mpi-4")
def test_bitwise_operators_have_short_names(world):
    """``and``, ``or`` and ``xor`` are those of MPI's names, and of bools the logical ones."""
    assert world.run(named_bitwise) == [[[4, 4], [7, 7], [0, 0]]] * 4
