"""Batch normalisation over all ranks gives what one process gives with all batches."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.algorithms import gradient_allreduce
from asyncddp.integrations.bagua.torch_api.contrib import SyncBatchNorm
from tests.support import LoopbackWorld

ROWS = [2, 3, 1]  # of each rank


def network(kind=torch.nn.BatchNorm2d, **options):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), kind(3, **options), torch.nn.Flatten())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(ROWS), 2, 2, 2, generator=generator).double()


def outcome(model, x, optimizer):
    """Outputs, gradients and statistics of two steps, and the output in evaluation."""
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    found += [buffer.clone() for buffer in model.buffers()]
    return [*found, model.eval()(x).detach()]


@pytest.mark.parametrize("options", [{}, {"momentum": None, "affine": False}])
def test_it_equals_one_process(options):
    """Outputs, gradients, running statistics, and evaluation; ranks have batches of any size."""

    def case():
        bagua.init_process_group()
        model = SyncBatchNorm.convert_sync_batchnorm(network(**options))
        assert isinstance(model[1], SyncBatchNorm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = gradient_allreduce.GradientAllReduceAlgorithm(average=False)
        model.with_bagua([optimizer], algorithm)
        return outcome(model, data().split(ROWS)[bagua.get_rank()], optimizer)

    ranks = LoopbackWorld(3).run(case)
    model = network(**options)
    expected = outcome(model, data(), torch.optim.SGD(model.parameters(), lr=0.01))
    for place, theirs in enumerate(expected):
        ours = [found[place] for found in ranks]
        if ours[0].shape != theirs.shape:
            ours = [torch.cat(ours)] * 3
        for one in ours:
            torch.testing.assert_close(one, theirs, rtol=1e-6, atol=1e-9)


def test_a_group_and_statistics_of_the_batch_alone():
    """Members of a group normalise together; without running statistics evaluation does so too."""

    def case():
        bagua.init_process_group()
        group = bagua.new_group([0, 2])
        if bagua.get_rank() == 1:
            return None
        norm = SyncBatchNorm(1, 0.0, track_running_stats=False, process_group=group)
        return norm.eval()(torch.full((1, 1), float(bagua.get_rank()))).item()

    assert LoopbackWorld(3).run(case) == [-1.0, None, 1.0]


def test_inputs_need_channels():
    """One dimension is refused; layers that are converted are not converted again."""

    def case():
        bagua.init_process_group()
        norm = SyncBatchNorm(1)
        assert SyncBatchNorm.convert_sync_batchnorm(norm) is norm
        with pytest.raises(bf.ArgumentError, match="at least 2 dimensions, got 1"):
            norm(torch.ones(1))

    LoopbackWorld(1).run(case)
