"""The optimizer wrapper on real processes: as on threads, W and the plain optimizer."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import on
from tests.support.pairwise import pairwise
from tests.unit.optim.optim_reference import (
    METHODS,
    PARAMETER_METHODS,
    batch,
    mlp,
    square_loss,
    train_by_matrix,
    train_here,
    vector,
)

PROCESSES = ["mpi-2", "shared_memory-4"]
processes = on(*PROCESSES)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.AdamW, lr=0.01)
STEPS = 4


def assert_all_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pairwise(
    world=PROCESSES,
    method=METHODS,
    make={"SGD": sgd, "AdamW": adam},
    options={
        "one bucket": {},
        "many buckets": {"bucket_size_in_mb": 1e-5},
        "closure": {"closure": True},
    },
)
def test_steps(world, method, make, options):
    """X+ = W X − U, W (X − U), or the central average, over a time-varying graph."""
    graph = topology.one_peer_exponential(world.size)
    got = world.run(train_here, method, graph, make, STEPS, **options)
    closure = options.get("closure", False)
    assert_all_close(got, train_by_matrix(method, graph, make, STEPS, closure=closure))


@processes
@pytest.mark.parametrize("method", PARAMETER_METHODS)
def test_static_graphs_and_local_steps(world, method):
    """The ring, averaging in every second step."""
    graph = topology.ring(world.size)
    got = world.run(train_here, method, graph, sgd, 5, num_steps_per_communication=2)
    expected = train_by_matrix(method, graph, sgd, 5, averages=lambda step: step % 2 == 1)
    assert_all_close(got, expected)


@processes
def test_update_in_backward(world):
    """Buckets that leave while the backward pass goes on."""
    graph = topology.ring(world.size)
    got = world.run(
        train_here,
        "adapt_then_combine",
        graph,
        adam,
        STEPS,
        bucket_size_in_mb=1e-5,
        update_in_backward=True,
    )
    assert_all_close(got, train_by_matrix("adapt_then_combine", graph, adam, STEPS))


def with_scaler(method):
    """Rank 1's third loss is infinite."""
    model = mlp(0 if method == "gradient_allreduce" else bf.rank())
    optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, method, broadcast=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = square_loss(model, batch(bf.rank(), step))
        scaler.scale(loss * (float("inf") if (bf.rank(), step) == (1, 2) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return optimizer.round, scaler.get_scale(), bool(vector(model).isfinite().all())


@processes
@pytest.mark.parametrize("method", METHODS)
def test_overflow_on_one_rank_holds_nobody_up(world, method):
    """The rank skips its update and takes part in the averaging; all parameters stay finite."""
    scales = [256.0] * world.size
    scales[1] = 128.0
    if method == "gradient_allreduce":
        scales = [128.0] * world.size
    assert world.run(with_scaler, method) == [(STEPS, scale, True) for scale in scales]


def of_several_megabytes(method):
    """Buckets that travel in bulk, in single precision; no gradient, so that averages are exact."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(bf.rank()))
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = bf.DistributedOptimizer(
        plain,
        model,
        method,
        topology=topology.one_peer_exponential(bf.size()),
        bucket_size_in_mb=1,
        broadcast=False,
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return values.min().item(), values.max().item(), bf.consensus_distance(model)


@processes
@pytest.mark.parametrize("method", PARAMETER_METHODS)
def test_large_buckets(world, method):
    """Two rounds of the one-peer exponential graph reach the mean of 2 or 4 ranks exactly."""
    mean = (world.size - 1) / 2
    assert world.run(of_several_megabytes, method) == [(mean, mean, 0.0)] * world.size


def equal_starts():
    """Broadcast of parameters and state, then the average model, on processes."""
    model = mlp(bf.rank())
    optimizer = adam(model.parameters())
    for _ in range(1 + bf.rank()):
        square_loss(model, batch(bf.rank(), 0)).backward()
        optimizer.step()
    bf.broadcast_parameters(model, root_rank=1)
    bf.broadcast_optimizer_state(optimizer, root_rank=1)
    assert bf.consensus_distance(model) < 1e-12
    with torch.no_grad():
        model[0].bias.fill_(bf.rank())
    with bf.average_model(model):
        lent = model[0].bias.unique().tolist()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return lent, model[0].bias.unique().tolist(), steps


@processes
def test_equal_starts_and_the_average(world):
    """All ranks hold rank 1's parameters and state; the average model is lent and given back."""
    mean = (world.size - 1) / 2
    expected = [([mean], [float(rank)], {2.0}) for rank in range(world.size)]
    assert world.run(equal_starts) == expected
