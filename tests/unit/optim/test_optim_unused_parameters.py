"""What has a gradient on no rank is moved by no method, whatever its compressor does."""

from __future__ import annotations

import io

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS, AveragedQuantity
from asyncddp.topology import TopologyError
from tests.support import LoopbackWorld
from tests.support.methods import every_step, fitting_graph, sgd_for

RANKS, STEPS = 3, 6
PLAIN = {"plain_compression": True}
CASES = {
    **{
        name: (name, {})
        for name, method in ALGORITHMS.items()
        if method.what is AveragedQuantity.PARAMETER and method.default_compression
    },
    "demo by signs": ("demo", {"compression": "sign"}),
    "choco_sgd by rank": ("choco_sgd", {"compression": "power_sgd"}),
    "deepsqueeze by cosines": ("deepsqueeze", {"compression": "dct_top_k"}),
    "diloco by cosines": ("diloco", {"compression": "dct_top_k"}),
    "plain": ("adapt_then_combine", {"compression": "minmax_uint8", **PLAIN}),
    "plain, seldom": ("local_sgd", {"compression": "qsgd_int8", **PLAIN}),
}


class Model(torch.nn.Module):
    """A parameter that is used on request, among others."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.seldom = torch.nn.Parameter(torch.linspace(0.1, 1.7, 10))
        self.last = torch.nn.Linear(5, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for one in (*self.first.parameters(), *self.last.parameters()):
                one.copy_(torch.randn(one.shape, generator=generator))

    def forward(self, x, used):
        x = self.last(torch.tanh(self.first(x)))
        return x + self.seldom.square().mean() if used else x


def made(name, options):
    model = Model()
    try:
        graph = {"topology": fitting_graph(name, bf.size())}
    except TopologyError:
        graph = {}
    plain = sgd_for(name, 0.05, momentum=0.0)(model.parameters())
    return model, bf.DistributedOptimizer(
        plain, model, name, **graph, **every_step(name), **options
    )


def train(model, optimizer, steps, used=lambda step: False):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * bf.rank() + step)
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=generator)
        (model(x, used(step)) - bf.rank()).square().mean().backward()
        optimizer.step()


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("case", CASES)
def test_unused_parameters_stay(case):
    """They keep their values to the bit, with the compressor that mixes or rounds the most."""
    name, options = CASES[case]

    def trained():
        model, optimizer = made(name, options)
        before = model.seldom.detach().clone(), vector(model)
        train(model, optimizer, range(STEPS))
        assert not torch.equal(vector(model), before[1])
        return torch.equal(model.seldom.detach(), before[0])

    assert all(LoopbackWorld(RANKS).run(trained))


def on_one_rank(step):
    """From the fourth step on, on rank 1 alone."""
    return step >= 3 and bf.rank() == 1


@pytest.mark.parametrize("name", ["demo", "sparse_loco"])
def test_one_rank_uses_it_later(name):
    """Then it takes part, from the state in which it would have been; replicas stay equal."""

    def trained():
        model, optimizer = made(name, {})
        start = model.seldom.detach().clone()
        train(model, optimizer, range(STEPS), on_one_rank)
        return vector(model), float((model.seldom.detach() - start).abs().max())

    ranks = LoopbackWorld(RANKS).run(trained)
    for values, moved in ranks:
        assert torch.equal(values, ranks[0][0])
        assert 0.0 < moved < 1.0


@pytest.mark.parametrize("name", ["demo", "choco_sgd", "deepsqueeze"])
def test_resuming_while_it_is_unused(name):
    """A run that is saved before its first use goes on to the bit."""

    def whole():
        model, optimizer = made(name, {})
        train(model, optimizer, range(STEPS), on_one_rank)
        return vector(model)

    def before():
        model, optimizer = made(name, {})
        train(model, optimizer, range(2))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        return file.getvalue()

    def after(saved):
        model, optimizer = made(name, {})
        with torch.no_grad():
            model.seldom.zero_()
        weights, state = torch.load(io.BytesIO(saved[bf.rank()]))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(2, STEPS), on_one_rank)
        return vector(model)

    saved = LoopbackWorld(RANKS).run(before)
    for got, want in zip(
        LoopbackWorld(RANKS).run(after, saved), LoopbackWorld(RANKS).run(whole), strict=True
    ):
        assert torch.equal(got, want)
