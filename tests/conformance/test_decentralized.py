"""DecentralizedDataParallel on every transport: equation, average model, runs that go on."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import on
from tests.unit.parallel.parallel_reference import (
    assert_all_close,
    in_turns,
    make_ddp,
    mlp,
    of_batch,
    simulate,
    train_here,
    vector,
)

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
worlds = on("mpi-2")
layouts = pytest.mark.parametrize(
    "options",
    [{"bucket_size_in_mb": 1e-5}, {"param_as_bucket_view": False}],
    ids=["views", "copied"],
)
STEPS = 6


@worlds
@layouts
@pytest.mark.parametrize("family", ["one_peer_exponential", "ring"])
def test_in_step_with_the_neighbours(world, family, options):
    """X+ = W X − U, while messages travel."""
    graph = getattr(topology, family)(world.size)
    got = world.run(train_here, graph, sgd, STEPS, **options)
    assert_all_close(got, simulate(graph, sgd, STEPS))


@worlds
@layouts
@pytest.mark.parametrize("family", ["one_peer_exponential", "ring"])
def test_through_windows_in_lockstep(world, family, options):
    """The same, where all wait for all after each step."""
    graph = getattr(topology, family)(world.size)
    got = world.run(train_here, graph, sgd, STEPS, sync=False, lockstep=True, **options)
    assert_all_close(got, simulate(graph, sgd, STEPS))


def look_at_the_average(sync):
    """Evaluate in mid-run, then go on from the average, then close."""
    model = mlp(bf.rank())
    ddp = make_ddp(model, sgd, sync=sync, grad_clip_norm=1e9)
    for step in range(3):
        of_batch(ddp, bf.rank(), step).backward()
    own = vector(model)
    ddp.eval()
    lent = vector(model)
    assert bf.consensus_distance(model) < 1e-12
    ddp.train()
    assert torch.equal(vector(model), own)
    of_batch(ddp, bf.rank(), 3).backward()
    ddp.global_avg()
    assert bf.consensus_distance(model) < 1e-12
    of_batch(ddp, bf.rank(), 4).backward()
    ddp.close()
    return own, lent


@worlds
@pytest.mark.parametrize("sync", [True, False])
def test_the_average_model(world, sync):
    """Lent for evaluation, or taken for good."""
    own, lent = zip(*world.run(look_at_the_average, sync), strict=True)
    assert_all_close(lent, [torch.stack(own).mean(0)] * world.size)


def in_large_buckets(sync):
    """Buckets of several megabytes in single precision, without gradients."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(bf.rank()))
    graph = topology.one_peer_exponential(bf.size())
    still = in_turns(partial(torch.optim.SGD, lr=0.0))
    ddp = make_ddp(model, still, topology=graph, sync=sync, bucket_size_in_mb=1)
    for _ in range(4):
        ddp(torch.ones(2, 512)).sum().backward()
        bf.win_flush()
        bf.barrier()
    values = vector(model)
    return values.min().item(), values.max().item(), len(ddp.bucket_names)


@worlds
@pytest.mark.parametrize("sync", [True, False])
def test_large_buckets(world, sync):
    """The one-peer exponential graph reaches the mean of 2 or 4 ranks exactly."""
    mean = (world.size - 1) / 2
    assert world.run(in_large_buckets, sync) == [(mean, mean, 8)] * world.size
