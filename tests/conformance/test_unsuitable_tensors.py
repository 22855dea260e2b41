"""Tensors that no verb can send or write are refused before anything is exchanged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.errors import ArgumentError
from tests.support import on
from tests.support.loops import on_each_rank
from tests.support.methods import one_of_each_kind

SOME = on("loopback-2", "mpi-2")


def verbs():
    """Each takes a tensor; those in place write it."""
    return {
        "allreduce": bf.allreduce,
        "neighbor_allreduce": lambda x: bf.neighbor_allreduce(x, name="fast"),
        "hierarchical_allreduce": bf.hierarchical_allreduce,
        "broadcast": bf.broadcast,
        "allgather": bf.allgather,
        "neighbor_allgather": bf.neighbor_allgather,
        "reduce_scatter": bf.reduce_scatter,
        "reduce": lambda x: bf.reduce(x, 0),
        "win_create": lambda x: bf.win_create(x, "window"),
        "a list": lambda x: bf.allreduce([torch.ones(4), x]),
        "a gathered list": lambda x: bf.allgather([torch.ones(4), x]),
    }


def in_place():
    return {
        "allreduce_": bf.allreduce_,
        "broadcast_": bf.broadcast_,
        "neighbor_allreduce_": lambda x: bf.neighbor_allreduce_(x, name="fast"),
        "hierarchical_allreduce_": bf.hierarchical_allreduce_,
        "allreduce_nonblocking_": bf.allreduce_nonblocking_,
        "out=": lambda x: bf.allreduce(torch.ones(4), out=x),
        "reduce out=": lambda x: bf.reduce(torch.ones(4), 0, out=x),
        "neighbor_allreduce out=": lambda x: bf.neighbor_allreduce(
            torch.ones(4), name="fast", out=x
        ),
        "a list": lambda x: bf.allreduce_([torch.ones(4), x]),
        "a list out=": lambda x: bf.allreduce([torch.ones(4)] * 2, out=[torch.ones(4), x]),
    }


def go_on():
    """Verbs with the same forms, through their fast paths: no rank has counted a refused call."""
    x = torch.full((4,), float(bf.rank()))
    assert len(bf.neighbor_allgather(torch.ones(4))) == 4 * len(bf.in_neighbor_ranks())
    mean = torch.full((4,), (bf.size() - 1) / 2)
    for _ in range(3):
        assert torch.equal(bf.neighbor_allreduce(x, name="fast"), mean)
        assert torch.equal(bf.allreduce(x), mean)
        assert torch.equal(bf.allreduce([x, x])[1], mean)
        assert torch.equal(bf.broadcast(x, 1), torch.ones(4))


def refused(calls, make, words):
    go_on()
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as told:
            call(make())
        assert words in str(told.value), (name, str(told.value))
        go_on()


@on("shared_memory-2", "mpi-2")
@on_each_rank
def test_distributed_tensors():
    """A DTensor's ``data_ptr`` is 0: reading it would end the process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        refused(
            {**verbs(), **in_place()}, lambda: DTensor.from_local(torch.ones(4), mesh), "to_local"
        )
        model = torch.nn.Linear(4, 1)
        model.weight = torch.nn.Parameter(DTensor.from_local(model.weight.data, mesh))
        with pytest.raises(ArgumentError, match=r"parameter weight is a DTensor, .*; give mesh="):
            bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    finally:
        dist.destroy_process_group()


@SOME
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on_each_rank
def test_nested_tensors(layout):
    """They have no shape, or one that no number says."""
    ragged = [torch.ones(2), torch.ones(3)]
    refused(
        {**verbs(), **in_place()},
        lambda: torch.nested.nested_tensor(ragged, layout=layout),
        "nested tensor",
    )


@SOME
@on_each_rank
def test_expanded_tensors_in_place():
    """Their elements share memory, which no result but an equal one can be written to."""
    refused(in_place(), lambda: torch.ones(1).expand(4), "expanded")
    x = torch.full((1,), float(bf.rank())).expand(4)
    assert torch.equal(bf.allreduce(x), torch.full((4,), (bf.size() - 1) / 2))


@SOME
@on_each_rank
def test_inference_tensors_in_place_outside_of_that_mode():
    """Torch lets nobody change them there."""

    def make():
        with torch.inference_mode():
            return torch.ones(4)

    refused(in_place(), make, "inference_mode")
    with torch.inference_mode():
        assert torch.equal(bf.allreduce_(torch.ones(4)), torch.ones(4))


@SOME
@pytest.mark.parametrize("kind", ["conj", "neg"])
@on_each_rank
def test_conjugate_and_negative_views_are_served(kind):
    """Alone, in lists, in place and as ``out``: what counts is their values, not their memory.

    Every verb on conjugate or negative views, three times, so that fast paths take them, too.
    """
    rank, root = bf.rank(), torch.tensor([1 + 2j, 3 - 1j])

    def make():
        if kind == "conj":
            return (root * (rank + 1)).conj()
        return torch._neg_view((root * (rank + 1)).real.clone())

    first = (make() / (rank + 1)).resolve_conj().resolve_neg()
    mean = 1.5 * first
    for _ in range(3):
        for verb in (bf.allreduce, bf.neighbor_allreduce, bf.hierarchical_allreduce):
            assert torch.equal(verb(make(), name="one"), mean)
            assert torch.equal(verb([make(), make()], name="several")[1], mean)
            out, outs = make(), [make(), make()]
            assert torch.equal(verb(make(), name="into", out=out), mean)
            assert torch.equal(out, mean)
            verb([make(), make()], name="list into", out=outs)
            assert torch.equal(outs[1], mean)
        for verb in (bf.allreduce_, bf.neighbor_allreduce_, bf.hierarchical_allreduce_):
            x, pair = make(), [make(), make()]
            assert verb(x, name="in place") is x
            verb(pair, name="list in place")
            assert torch.equal(x, mean)
            assert torch.equal(pair[0], mean)
        x, pair, out = make(), [make(), make()], make()
        bf.broadcast_(x), bf.broadcast_(pair), bf.broadcast(make(), out=out)
        for got in (x, *pair, out, bf.broadcast(make()), bf.allgather(make())[:2]):
            assert torch.equal(got, first)


@SOME
@on_each_rank
def test_broadcast_into_memory_that_overlaps_its_input():
    """The root's tensor is read before it is overwritten."""
    for count in (8, 400_000):
        third = count // 4
        for group in (None, bf.new_group([0, 1])):
            for mine, theirs in ((slice(0, -third), slice(third, None)),) * 2:
                for one, other in ((mine, theirs), (theirs, mine)):
                    x = torch.arange(count, dtype=torch.float32) + bf.rank()
                    expected = torch.arange(count, dtype=torch.float32)[one].clone()
                    got = bf.broadcast(x[one], 0, out=x[other], group=group)
                    assert torch.equal(got, expected)
                    assert torch.equal(x[other], expected)


def trains(method, kind):
    """Train by a method; what it says of complex parameters or sparse gradients, else None."""
    if kind == "complex":
        model = torch.nn.Linear(3, 3, dtype=torch.complex64)
        inputs = torch.ones(2, 3, dtype=torch.complex64)
    else:
        model, inputs = torch.nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2])
    try:
        opt = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model=model,
            algorithm=method,
            force=True,
        )
        for _ in range(2):
            opt.zero_grad()
            model(inputs).abs().sum().backward()
            opt.step()
    except ArgumentError as error:
        return str(error)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return None


@pytest.mark.parametrize("kind", ["complex", "sparse"])
@pytest.mark.parametrize(
    "method", [name for name in one_of_each_kind(ALGORITHMS) if name != "qadam"]
)
def test_methods_train_complex_and_sparse_models_or_name_the_parameter(method, kind):
    """An error is an ArgumentError with method, parameter and remedy, the same on all ranks."""
    with bf.local_world(2) as world:
        one, other = world.run(trains, method, kind)
    assert one == other
    if one is not None:
        assert (
            "weight is torch.complex64" in one
            or "bias is torch.complex64" in one
            or ("the gradient of weight is torch.sparse_coo" in one)
        )
        assert "adapt_with_combine" in one
        assert one.startswith((f"{method}: ", "gradient_allreduce: "))
