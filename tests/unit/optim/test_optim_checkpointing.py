"""Gradients formed in a backward pass inside the backward pass are averaged once, as a whole."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

import asyncddp as bf
from tests.unit.optim.optim_reference import filled


class Checkpointed(torch.nn.Module):
    """The last layer, whose gradients come first, is evaluated again in the backward pass."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = torch.nn.Linear(3, 3).double()
        self.last = torch.nn.Linear(3, 1).double()

    def forward(self, x):
        return checkpoint(self.last, torch.tanh(self.first(x)), use_reentrant=self.reentrant)


def trained(*, reentrant):
    model = filled(Checkpointed(reentrant=reentrant), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bf.DistributedGradientAllreduceOptimizer(sgd, model)
    data = torch.Generator().manual_seed(bf.rank())
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=data, dtype=torch.float64)
        model(x).square().sum().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), optimizer.round


def test_reentrant_checkpoints_change_nothing_about_gradient_allreduce():
    """Reentrant checkpoints give the same weights, bit for bit, in as many rounds."""
    with bf.local_world(2, timeout=90) as world:
        plain = world.run(lambda: trained(reentrant=False))
        inner = world.run(lambda: trained(reentrant=True))
    for (want, rounds), (got, more) in zip(plain, inner, strict=True):
        assert torch.equal(got, want)
        assert more == rounds == 3
