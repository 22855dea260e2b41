"""The exponential moving average of a model, by torch's ``AveragedModel``, over a resume."""

from __future__ import annotations

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld

STEPS = 6


def vector(model):
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def trained(folder, steps):
    """Train up to a step, from the checkpoint that is there; give EMA, its average and theirs."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        "adapt_then_combine",
        topology=topology.ring(bf.size()),
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    found = bf.load_checkpoint(folder, model, optimizer)
    if found is not None:
        ema.load_state_dict(found.extra["ema"])
    means = []
    for step in range(0 if found is None else found.step, steps):
        generator = torch.Generator().manual_seed(100 * step + bf.rank())
        optimizer.zero_grad()
        data = torch.randn(5, 3, dtype=torch.float64, generator=generator)
        (model(data) - bf.rank()).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)
        means.append(bf.allreduce(vector(model)))
    bf.save_checkpoint(
        folder, model, optimizer, replicas="all", extra={"ema": ema.state_dict()}, step=steps
    )
    own = vector(ema)
    with bf.average_model(ema):
        return own, vector(ema), means


def test_resumes_bit_by_bit(tmp_path):
    """Each rank's EMA after a resume is that of an uninterrupted run."""
    world = LoopbackWorld(4)
    whole = world.run(trained, tmp_path / "whole", STEPS)
    world.run(trained, tmp_path / "resumed", STEPS // 2)
    resumed = world.run(trained, tmp_path / "resumed", STEPS)
    for (one, *_), (other, *_) in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole[0][0], whole[1][0]), "each rank has its own"


def test_the_average_of_averages(tmp_path):
    """The mean of the ranks' EMAs is the EMA of their mean, for which no step has to average."""
    for _, averaged, means in LoopbackWorld(4).run(trained, tmp_path, STEPS):
        expected = means[0]
        for mean in means[1:]:
            expected = 0.9 * expected + 0.1 * mean
        torch.testing.assert_close(averaged, expected, rtol=1e-12, atol=1e-12)


def test_the_average_takes_its_first_values_from_the_start():
    """The wrapper's equal start comes before the first update, so that it is in the average."""

    def case():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, float(bf.rank()))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        ema.update_parameters(model)
        return ema.module.weight.item()

    assert LoopbackWorld(2).run(case) == [0.0, 0.0]
