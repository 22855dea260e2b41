"""One-sided methods on real processes: matrix recursions with barriers, no waiting without."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.support import FileEvent, on
from tests.unit.optim.optim_reference import batch, mlp, square_loss
from tests.unit.optim.test_optim_one_sided import (
    METHODS,
    assert_all_close,
    by_matrix,
    run,
    sgd,
    unbalanced,
)

two = on("mpi-2")
four = on("shared_memory-4")
every_method = pytest.mark.parametrize("method", METHODS)
adam = partial(torch.optim.AdamW, lr=0.01)


@four
@every_method
def test_where_ranks_meet_rounds_are_synchronous(world, method):
    """X+ = W X − U over a time-varying graph, or SGP, in several buckets."""
    graph = topology.one_peer_exponential(world.size)
    got = world.run(run, method, graph, adam, 4, bucket_size_in_mb=1e-5)
    assert_all_close(got, by_matrix(method, graph, adam, 4))


@four
def test_push_sum_on_an_unbalanced_digraph(world):
    """Unequal degrees, so that p is not 1."""
    got = world.run(run, "push_sum", unbalanced(), sgd, 5)
    assert_all_close(got, by_matrix("push_sum", unbalanced(), sgd, 5))


def large(method, steps):
    """Windows of several megabytes; no gradient, so that averages are exact."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(bf.rank()))
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        method,
        topology=topology.one_peer_exponential(bf.size()),
        bucket_size_in_mb=2,
        broadcast=False,
    )
    optimizer.force_barrier = True
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return values.min().item(), values.max().item()


@two
@every_method
def test_large_buckets(world, method):
    """The one-peer exponential graph reaches the mean of two ranks exactly."""
    assert world.run(large, method, 2) == [(0.5, 0.5)] * world.size


def beside_a_straggler(method, slow, folder):
    """One rank stops in the midst of its steps until the others have made all of theirs."""
    through = FileEvent(folder / "through")
    model = mlp(bf.rank())
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model,
        method,
        topology=topology.ring(bf.size()),
        broadcast=False,
    )
    bf.barrier()
    for step in range(12):
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), 0)).backward()
        if (bf.rank(), step) == (slow, 2):
            through.wait_for([rank for rank in range(bf.size()) if rank != slow])
        optimizer.step()
    through.of(bf.rank()).set()
    bf.barrier()


@four
@every_method
def test_a_straggler_holds_nobody_up(world, tmp_path, method):
    """Between two of its steps the others make many."""
    world.run(beside_a_straggler, method, 3, tmp_path)


def bounded(method, slow, bound, steps):
    """How many steps neighbours were behind at most, and how old what was mixed was.

    One rank is slow; all make as many steps.
    """
    model = mlp(bf.rank())
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model,
        method,
        topology=topology.ring(bf.size()),
        max_staleness=bound,
        broadcast=False,
    )
    lags, behind = [], []
    for step in range(steps):
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), 0)).backward()
        if bf.rank() == slow:
            time.sleep(0.03)
        optimizer.step()
        ages = optimizer.staleness().values()
        lags += [age.lag for age in ages if step > bound]
        behind += [age.lag - age.steps for age in ages]
    bf.barrier()
    return max(lags), max(behind)


@four
@every_method
def test_bounded_staleness_bounds_what_is_mixed(world, method):
    """With max_staleness=2 neighbours have come as far, but for two steps; so has what is mixed."""
    got = world.run(bounded, method, 3, 2, 25)
    behind = max(behind for _, behind in got)
    assert 0 < behind <= 2
    if method != "push_sum":  # who has not taken a share gets no other, and is told the step alone
        assert max(lag for lag, _ in got) <= 2


def mass(steps):
    """z p and p of a rank after irregular rounds of push-sum and some that collect all."""
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, float(bf.rank()))
    optimizer = bf.DistributedPushSumOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model, topology=unbalanced(), broadcast=False
    )
    for step in range(steps):
        optimizer.step()
        if (step + bf.rank()) % 7 == 0:
            time.sleep(0.002)
    bf.barrier()
    time.sleep(0.2)  # what is under way between processes arrives
    optimizer.force_barrier = True
    for _ in range(60):
        optimizer.step()
    p = optimizer._averager.windows.push_sum_weights()[0]
    return model.weight[0, 0].item(), p


@four
def test_push_sum_keeps_the_mass(world):
    """However irregular: Σ p = n, and Σ z p what it was, and z the true mean in the end."""
    got = world.run(mass, 150)
    assert sum(p for _, p in got) == pytest.approx(4.0, rel=1e-12)
    assert sum(z * p for z, p in got) == pytest.approx(6.0, rel=1e-12)
    assert [z for z, _ in got] == pytest.approx([1.5] * 4, rel=1e-9)
