"""DecentralizedDataParallel in step with its neighbours: X+ = W X − U(G(X)), whatever the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.parallel.parallel_reference import (
    assert_all_close,
    batch,
    convnet,
    filled,
    image_loss,
    make_ddp,
    mlp,
    of_batch,
    simulate,
    square_loss,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

GRAPH = topology.one_peer_exponential(4)
RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.AdamW, lr=0.01)
still = partial(torch.optim.SGD, lr=0.0)
every_layout = pytest.mark.parametrize(
    "options",
    [{}, {"bucket_size_in_mb": 1e-5}, {"param_as_bucket_view": False, "bucket_size_in_mb": 1e-4}],
    ids=["one bucket", "many buckets", "copied"],
)


# the equation


@every_layout
@pytest.mark.parametrize("make", [sgd, adam], ids=["SGD", "AdamW"])
@pytest.mark.parametrize(
    "graph",
    [GRAPH, topology.ring(4), topology.complete(4)],
    ids=["one peer", "ring", "complete"],
)
def test_the_equation(graph, make, options):
    """X+ = W X − U, from the first backward pass on, with every rank at its own start."""
    got = LoopbackWorld(RANKS).run(train_here, graph, make, 6, **options)
    assert_all_close(got, simulate(graph, make, 6))


def test_one_step_by_hand():
    """One step of SGD on two ranks: the mean of the starts less the own gradient."""

    def model_of(rank):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 1.0 + 2.0 * rank)
        return model

    def loss_of(model, rank, step):
        return (10.0 + rank) * model(torch.ones(1, 1, dtype=torch.float64)).sum()

    make = partial(torch.optim.SGD, lr=0.5)
    got = LoopbackWorld(2).run(
        train_here, topology.complete(2), make, 1, model_of=model_of, loss_of=loss_of
    )
    assert [x.item() for x in got] == [2.0 - 5.0, 2.0 - 5.5]


def test_it_is_the_optimizer_adapt_with_combine():
    """The wrapper of the module and the wrapper of the optimizer train alike, for long."""

    def with_optimizer():
        model = mlp(bf.rank())
        optimizer = bf.DistributedAdaptWithCombineOptimizer(
            sgd(model.parameters()), model, topology=GRAPH, broadcast=False
        )
        for step in range(40):
            optimizer.zero_grad()
            of_batch(model, bf.rank(), step).backward()
            optimizer.step()
        return vector(model)

    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 40, bucket_size_in_mb=1e-4)
    assert_all_close(got, LoopbackWorld(RANKS).run(with_optimizer))


def test_heterogeneous_parameters_follow_the_matrix():
    """Without gradients the parameters are W^k X after k passes, and their mean stays."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, still, topology=topology.ring(4))
        seen = [vector(model)]
        for step in range(5):
            of_batch(ddp, bf.rank(), step).backward()
            seen.append(vector(model))
        return torch.stack(seen)

    x = torch.stack(LoopbackWorld(RANKS).run(case), dim=1)  # step, rank, entry
    w = torch.from_numpy(topology.mixing_matrix(topology.ring(4)))
    for step in range(5):
        torch.testing.assert_close(x[step + 1], w @ x[step], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(x.mean(1), x.mean(1)[:1].expand(6, -1), rtol=1e-12, atol=1e-14)
    assert x[5].std(0).max() < x[0].std(0).max() / 2, "the ranks came no nearer to each other"


def test_all_ranks_start_as_rank_0():
    """Parameters and buffers are broadcast, unless the user wants it otherwise."""

    def case(broadcast):
        model = convnet(bf.rank())
        model[1].running_mean.fill_(bf.rank())
        make_ddp(model, sgd, broadcast=broadcast)
        return vector(model), model[1].running_mean.tolist(), model[0].weight.stride()

    for values, mean, strides in LoopbackWorld(RANKS).run(case, True):
        assert torch.equal(values, vector(convnet(0)))
        assert mean == [0.0] * 4
        assert strides == convnet(0)[0].weight.stride()
    for rank, (values, mean, _) in enumerate(LoopbackWorld(RANKS).run(case, False)):
        assert torch.equal(values, vector(convnet(rank)))
        assert mean == [float(rank)] * 4


@every_layout
def test_one_rank_is_plain_torch(options):
    """At n = 1 nothing but the optimizer happens."""
    got = LoopbackWorld(1).run(train_here, None, sgd, 5, **options)
    assert_all_close(got, simulate(topology.ring(1), sgd, 5))


# models


@every_layout
def test_convolutions_and_batch_normalisation(options):
    """Channels-last parameters, and buffers that are each rank's own."""
    arguments = {"model_of": convnet, "loss_of": image_loss}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 4, **arguments, **options)
    assert_all_close(got, simulate(GRAPH, sgd, 4, **arguments))


class Sometimes(torch.nn.Module):
    """The second layer is used from the third step on, and not in every step."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 3, dtype=torch.float64)
        self.second = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.never = torch.nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x, second):
        x = self.first(x)
        return self.second(x) if second else x


@every_layout
def test_parameters_without_gradients_travel_all_the_same(options):
    """What the first pass did not use is mixed, and updated when a gradient comes; so is the rest.

    In the last steps rank 0 does not use the layer that the others do.
    """

    def loss_of(model, rank, step):
        second = step in (2, 3) or (step in (5, 6) and rank > 0)
        return (model(batch(rank, step), second) - 1.0).square().mean()

    arguments = {"model_of": lambda rank: filled(Sometimes(), rank), "loss_of": loss_of}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 8, **arguments, **options)
    assert_all_close(got, simulate(GRAPH, sgd, 8, **arguments))


@every_layout
def test_a_bucket_some_of_whose_gradients_stay_away(options):
    """A layer of the first pass that a later one skips: its bucket is finished at the end."""

    def loss_of(model, rank, step):
        return (model(batch(rank, step), step != 2 + rank) - 1.0).square().mean()

    arguments = {"model_of": lambda rank: filled(Sometimes(), rank), "loss_of": loss_of}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 6, **arguments, **options)
    assert_all_close(got, simulate(GRAPH, sgd, 6, **arguments))


class Tied(torch.nn.Module):
    """Two layers of one weight, and a parameter that is frozen."""

    def __init__(self):
        super().__init__()
        self.there = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.again = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.again.weight = self.there.weight
        self.frozen = torch.nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return self.again(torch.tanh(self.there(x))) * self.frozen


@every_layout
def test_tied_and_frozen_parameters(options):
    """A weight that is used twice is one parameter; a frozen one is each rank's own."""

    def model_of(rank):
        return filled(Tied(), rank)

    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 5, model_of=model_of, **options)
    own = torch.stack([model_of(rank).frozen for rank in range(RANKS)])

    def thaw(step, models):
        for model, value in zip(models, own, strict=True):
            model.frozen.data.copy_(value)

    expected = simulate(GRAPH, sgd, 5, model_of=model_of, before=thaw)
    frozen = slice(0, 4)  # a module's own parameters come first
    for one, other, value in zip(got, expected, own, strict=True):
        assert torch.equal(one[frozen], value)
        torch.testing.assert_close(one[4:], other[4:], rtol=1e-12, atol=1e-13)


class Mixed(torch.nn.Module):
    """Layers of three dtypes, one after the other."""

    def __init__(self, rank):
        super().__init__()
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)
        filled(self, rank)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


@every_layout
def test_several_dtypes(options):
    """Each has blocks of its own; messages carry what the parameters are."""
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, still, 3, model_of=Mixed, **options)
    expected = simulate(GRAPH, still, 3, model_of=Mixed)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
        torch.testing.assert_close(one[:20], other[:20], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(one[20:40], other[20:40], rtol=1e-5, atol=1e-6)


def test_autocast():
    """bfloat16 activations over single parameters: everything travels in single precision."""

    def loss_of(model, rank, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch(rank, step).float())
        return (out.float() - 1.0).square().mean()

    def model_of(rank):
        return mlp(rank).float()

    arguments = {"model_of": model_of, "loss_of": loss_of}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 3, **arguments)
    for one, other in zip(got, simulate(GRAPH, sgd, 3, **arguments), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


def test_two_models_in_one_process():
    """Their messages do not meet, in whatever order the ranks make their steps."""

    def case():
        models = [mlp(bf.rank()), mlp(bf.rank() + 10)]
        wrapped = [make_ddp(model, sgd, topology=GRAPH) for model in models]
        of_batch(wrapped[0], bf.rank(), 0).backward()
        of_batch(wrapped[1], bf.rank(), 0).backward()
        for step in range(1, 4):
            for which in (0, 1) if bf.rank() % 2 else (1, 0):
                of_batch(wrapped[which], bf.rank(), step).backward()
        return [vector(model) for model in models]

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close([first for first, _ in got], simulate(GRAPH, sgd, 4))
    expected = simulate(GRAPH, sgd, 4, model_of=lambda rank: mlp(rank + 10))
    assert_all_close([second for _, second in got], expected)


class Checkpointed(torch.nn.Module):
    """Layers whose activations are computed anew in the backward pass, one of them used twice."""

    def __init__(self, rank, reentrant):
        super().__init__()
        self.inner = mlp(rank)
        self.last = filled(torch.nn.Linear(3, 4, dtype=torch.float64), rank)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
            x = checkpoint(self.last, x, use_reentrant=self.reentrant)
        return x


@every_layout
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, options):
    """Backward passes inside the backward pass, with several gradients for a parameter."""
    arguments = {"model_of": lambda rank: Checkpointed(rank, reentrant)}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 4, **arguments, **options)
    assert_all_close(got, simulate(GRAPH, sgd, 4, model_of=lambda rank: Checkpointed(rank, False)))


def test_gradients_of_gradients():
    """A pass of autograd.grad is no step; the backward pass after it is."""

    def loss_of(model, rank, step):
        x = batch(rank, step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return square_loss(model, x) + 0.1 * slope.square().mean()

    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 4, loss_of=loss_of)
    assert_all_close(got, simulate(GRAPH, sgd, 4, loss_of=loss_of))


def test_outputs_of_any_structure():
    """Dictionaries of lists of tensors, some of which need no gradient."""

    class Structured(torch.nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.inner = mlp(rank)

        def forward(self, *, x):
            return {"out": [self.inner(x)], "x": x, "weight": self.inner[0].weight}

    def loss_of(model, rank, step):
        found = model(x=batch(rank, step))
        return (found["out"][0] - 1.0).square().mean() + found["weight"].square().mean()

    arguments = {"model_of": Structured, "loss_of": loss_of}
    got = LoopbackWorld(RANKS).run(train_here, GRAPH, sgd, 4, **arguments)
    assert_all_close(got, simulate(GRAPH, sgd, 4, **arguments))


def test_a_model_that_is_called_without_the_wrapper():
    """The gradients are heard of all the same."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH)
        for step in range(4):
            of_batch(ddp.module, bf.rank(), step).backward()
        return vector(model)

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(GRAPH, sgd, 4))


# topologies


def test_another_topology_in_mid_run():
    """The message under way keeps the old one, the next has the new one."""
    ring, complete = topology.ring(4), topology.complete(4)

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=ring, bucket_size_in_mb=1e-4)
        for step in range(6):
            of_batch(ddp, bf.rank(), step).backward()
            if step == 2:
                ddp.set_topology(complete)
        return vector(model)

    def mixes(step):
        return torch.from_numpy(topology.mixing_matrix(ring if step <= 3 else complete))

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(None, sgd, 6, mixes=mixes))


def test_the_topology_of_the_world():
    """Without one of its own it takes the one that is set when it sends."""
    ring, star = topology.ring(4), topology.metropolis_weights(topology.star(4))

    def case():
        bf.set_topology(ring)
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd)
        for step in range(6):
            if step == 2:
                bf.set_topology(star)
            of_batch(ddp, bf.rank(), step).backward()
        return vector(model)

    def mixes(step):
        return torch.from_numpy(topology.mixing_matrix(ring if step <= 2 else star))

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(None, sgd, 6, mixes=mixes))


def test_topologies_that_do_not_fit():
    """Refused on entry and in mid-run, with what would fit; the old one stays."""

    def case():
        with pytest.raises(topology.TopologyError, match=r"ring\(3\) has 3 nodes, .* 4 ranks here"):
            make_ddp(mlp(0), sgd, topology=topology.ring(3))
        star = topology.uniform_weights(topology.star(4))
        words = r"DecentralizedDataParallel cannot run on .*not doubly stochastic"
        with pytest.raises(topology.TopologyError, match=words):
            make_ddp(mlp(0), sgd, topology=star)
        ddp = make_ddp(mlp(0), sgd, topology=topology.ring(4))
        with pytest.raises(topology.TopologyError, match=words):
            ddp.set_topology(star)
        of_batch(ddp, bf.rank(), 0).backward()
        bf.set_topology(star)
        with pytest.raises(topology.TopologyError, match=words):
            make_ddp(mlp(0), sgd)
        of_batch(ddp, bf.rank(), 1).backward()
        return ddp.steps

    assert LoopbackWorld(RANKS).run(case) == [2] * RANKS
