"""``decoupled_diloco``: in step it is DiLoCo, and out of step neighbours count by what they did."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld

ETA, MU, RATE = 0.7, 0.9, 0.1
SLOPES = np.array([1.0, -2.0, 3.0, 0.5])


def wrapped(name="decoupled_diloco", *, graph=topology.complete, sizes=(4, 3), **options):
    """A model of two parameters on this rank, and its optimizer."""
    model = torch.nn.ParameterList(torch.zeros(size, dtype=torch.float64) for size in sizes)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"topology": graph(bf.size()), **options}
    return model, bf.DistributedOptimizer(sgd, model, name, **options)


def step(model, optimizer):
    """One step on f(x) = (x - slope)²/2 of each number, with this rank's slope."""
    for parameter in model:
        parameter.grad = parameter.detach() - SLOPES[bf.rank()]
    optimizer.step()


def in_step(name, **options):
    """This rank's parameters after each step of ranks that wait for each other."""
    model, optimizer = wrapped(name, communication_interval=3, fragments=2, **options)
    found = []
    for _ in range(24):
        step(model, optimizer)
        found.append(torch.cat([one.detach().clone() for one in model]))
    return torch.stack(found)


def test_in_step_on_the_complete_graph_it_is_streaming_diloco():
    """With fragments, which are averaged in turn: without delay, at 1e-12."""
    own = LoopbackWorld(4).run(in_step, "decoupled_diloco", max_staleness=0)
    other = LoopbackWorld(4).run(in_step, "streaming_diloco", delay=0, mixing=0.0)
    for one, expected in zip(own, other, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [(1, 1), (3, 0, 1), (0, 0, 5)])
def test_a_neighbour_counts_as_often_as_it_has_put(rounds):
    """One that was silent has no weight, and one of three rounds has three times its weight."""

    def both():
        first = []
        model, optimizer = wrapped(sizes=(1,), communication_interval=1, fragments=1)
        near = topology.neighbors_of(topology.complete(2), bf.rank())
        for count in (1, *rounds):
            other = []
            for _ in range(count if bf.rank() == 1 else 0):
                before = model[0].item()
                step(model, optimizer)
                other.append(before - RATE * (before - SLOPES[1]))
            put = bf.allgather(torch.tensor(other[-1:] or [0.0], dtype=torch.float64))[1].item()
            if bf.rank() == 0:
                before = model[0].item()
                step(model, optimizer)
                own = before - RATE * (before - SLOPES[0])
                (weight,) = near.src_weights.values()
                total = near.self_weight + weight * count
                mean = (near.self_weight * own + weight * count * put) / total
                first.append((before, mean, model[0].item()))
            bf.barrier()
        return first

    made, momentum = LoopbackWorld(2).run(both)[0], 0.0
    for before, mean, after in made:
        change = before - mean
        momentum = MU * momentum + change
        assert after == pytest.approx(before - ETA * (change + MU * momentum), abs=1e-12)
