"""Parameters of all kinds: frozen, unused, shared, moved, mixed, compiled; and groups of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.optim.optim_reference import (
    METHODS,
    PARAMETER_METHODS,
    Late,
    batch,
    filled,
    mlp,
    square_loss,
    train_by_matrix,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

GRAPH = topology.one_peer_exponential(4)
RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
every_method = pytest.mark.parametrize("method", METHODS)


def assert_all_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


class Odd(nn.Module):
    """Parameters where one does not look for them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))  # owned by a non-leaf
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.again = self.first  # used twice, and known under two names
        self.head = nn.Linear(4, 2, bias=False, dtype=torch.float64)
        self.tail = nn.Linear(2, 4, bias=False, dtype=torch.float64)
        self.tail.weight = nn.Parameter(self.head.weight.detach().t().contiguous())
        self.lists = nn.ParameterList([torch.ones((), dtype=torch.float64)])  # 0-dim
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.again(torch.tanh(self.first(x * self.scale))))
        return self.tail(self.head(hidden)) * self.lists[0] + self.frozen.sum()


def odd(rank):
    return filled(Odd(), rank)


def leaf(rank):
    return filled(nn.Linear(4, 2, dtype=torch.float64), rank)


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.decode = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


def tied(rank):
    return filled(Tied(), rank)


def channels_last(rank):
    conv = nn.Sequential(
        nn.Unflatten(1, (2, 2, 1)),
        nn.Conv2d(2, 3, (2, 1), dtype=torch.float64),
        nn.Flatten(),
        nn.Linear(3, 2, dtype=torch.float64),
    )
    return filled(conv, rank).to(memory_format=torch.channels_last)


@every_method
@pytest.mark.parametrize("model_of", [odd, leaf, tied, channels_last])
def test_models_of_all_kinds(method, model_of):
    """What the matrix says holds for trainable parameters; the others stay as they are."""
    flags = [p.requires_grad for p in model_of(0).parameters() for _ in range(p.numel())]
    got = LoopbackWorld(RANKS).run(train_here, method, GRAPH, sgd, 4, model_of=model_of)
    expected = train_by_matrix(
        method, GRAPH, sgd, 4, model_of=model_of, travels=lambda step: torch.tensor(flags)
    )
    assert_all_close(got, expected)


@every_method
def test_a_frozen_parameter_influences_nobody(method):
    """Ranks may hold different frozen parameters; trainable ones mix as always."""

    def model_of(rank):
        model = mlp(rank)
        model[0].bias.requires_grad_(False)
        return model

    def case():
        model = model_of(0 if method == "gradient_allreduce" else bf.rank())
        model[0].bias.data.fill_(bf.rank())
        plain = sgd(model.parameters())
        optimizer = bf.DistributedOptimizer(plain, model, method, topology=GRAPH, broadcast=False)
        for _ in range(2):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), 0)).backward()
            optimizer.step()
        return model[0].bias.detach().clone(), model[0].weight.detach().clone()

    got = LoopbackWorld(RANKS).run(case)
    assert [bias.unique().tolist() for bias, _ in got] == [[float(rank)] for rank in range(RANKS)]
    assert not torch.equal(got[0][1], model_of(0)[0].weight.detach())


def test_gradients_of_unused_parameters():
    """Zero where another rank has used the parameter, None where nobody has."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 1), nn.Linear(4, 1)
            self.never = nn.Linear(4, 1)

        def forward(self, x):
            return self.always(x) + (self.sometimes(x) if bf.rank() == 2 else 0.0)

    def case(cap):
        model = Two()
        nn.init.ones_(model.sometimes.weight)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(
            plain, model, "gradient_allreduce", bucket_size_in_mb=cap
        )
        model(torch.ones(1, 4)).sum().backward()
        assert model.never.weight.grad is None
        shared = model.sometimes.weight.grad
        assert shared is not None
        assert shared.shape == model.sometimes.weight.shape
        optimizer.step()
        return shared.flatten().tolist()

    for cap in (1e-6, 25):
        assert LoopbackWorld(RANKS).run(case, cap) == [[0.25] * 4] * RANKS


def mixed_dtypes():
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.complex64)
    model = nn.ModuleList([nn.Linear(2, 2, dtype=dtype) for dtype in dtypes])
    for parameter in model.parameters():
        nn.init.constant_(parameter, bf.rank() + 1)
    return model


@pytest.mark.parametrize("method", PARAMETER_METHODS)
def test_mixed_dtypes(method):
    """Every dtype has its buckets, and averages in itself."""

    def case():
        model = mixed_dtypes()
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(
            plain, model, method, communication="allreduce", broadcast=False
        )
        optimizer.step()
        assert {p.dtype for p in model.parameters()} == {
            torch.float64, torch.bfloat16, torch.float32, torch.complex64
        }  # fmt: skip
        return [complex(p.flatten()[0].item()) for p in model.parameters()]

    assert LoopbackWorld(RANKS).run(case) == [[2.5 + 0j] * 8] * RANKS


# what users do to parameters


def train_on(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), step)).backward()
        optimizer.step()


def reloaded(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def load_copied(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def assigned(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def there_and_back(model):
    model.float().double()


def transposed(model):
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t()


def shared(model):
    model.share_memory()  # as a queue of processes does with what is put into it


IN_BACKWARD = ("adapt_then_combine", {"update_in_backward": True})
every_way = pytest.mark.parametrize(
    ("method", "options"), [*((method, {}) for method in METHODS), IN_BACKWARD]
)


@every_way
@pytest.mark.parametrize("change", [load_copied, assigned, there_and_back, transposed, shared])
def test_parameters_may_be_replaced_between_steps(method, options, change):
    """Buckets notice that a parameter no longer is their view, and take it in again."""

    def case(change):
        model = mlp(0 if method == "gradient_allreduce" else bf.rank())
        if change is there_and_back:
            for parameter in model.parameters():
                parameter.data = parameter.data.float().double()
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()), model, method, topology=GRAPH, **options, broadcast=False
        )
        for step in range(4):
            if step == 2 and change is not None:
                if change is there_and_back:
                    value = vector(model)
                    change(model)
                    nn.utils.vector_to_parameters(value, model.parameters())
                else:
                    change(model)
            train_on(model, optimizer, 1, first=step)
        return vector(model)

    changed = LoopbackWorld(RANKS).run(case, change)
    undisturbed = LoopbackWorld(RANKS).run(case, None)
    if change is there_and_back:
        for one, other in zip(changed, undisturbed, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    else:
        assert_all_close(changed, undisturbed)


def tied_by_storage(rank):
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)))
    filled(model, rank)
    model[1].weight.data = model[0].weight.data.t()
    return model


@pytest.mark.parametrize("method", PARAMETER_METHODS)
@pytest.mark.parametrize("bucket_size_in_mb", [25, 1e-5])
def test_weights_tied_by_storage_are_refused(method, bucket_size_in_mb):
    """Buckets would end the tie: the error names both, also for one that is made between steps."""
    tie = r"(0.weight and 1.weight|1.weight and 0.weight) share memory"

    def case():
        model = tied_by_storage(bf.rank())
        with pytest.raises(bf.ArgumentError, match=tie):
            bf.DistributedOptimizer(sgd(model.parameters()), model, method, topology=GRAPH)
        model[1].weight.data = model[1].weight.data.clone()
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()),
            model,
            method,
            topology=GRAPH,
            bucket_size_in_mb=bucket_size_in_mb,
        )
        train_on(model, optimizer, 2)
        model[1].weight.data = model[0].weight.data.t()
        with pytest.raises(bf.ArgumentError, match=tie):
            train_on(model, optimizer, 1)

    LoopbackWorld(RANKS).run(case)


def test_a_buffer_in_a_parameters_memory_is_refused():
    """So is one that would keep the value of before, as long as the parameter moves."""

    def case():
        model = leaf(bf.rank())
        model.register_buffer("first_row", model.weight.detach()[0])
        with pytest.raises(bf.ArgumentError, match=r"first_row and weight|weight and first_row"):
            bf.DistributedOptimizer(sgd(model.parameters()), model, topology=GRAPH)

    LoopbackWorld(RANKS).run(case)


def test_gradient_allreduce_leaves_a_tie_by_storage():
    """It moves no parameter, so that both are one, as in one process."""

    def case():
        model = tied_by_storage(0)
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, "gradient_allreduce")
        train_on(model, optimizer, 2)
        return torch.equal(model[0].weight, model[1].weight.t())

    assert all(LoopbackWorld(RANKS).run(case))


def test_assigned_parameters_must_be_the_optimizers():
    """``load_state_dict(assign=True)`` makes parameters that no optimizer of torch follows."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, topology=GRAPH)
        train_on(model, optimizer, 1)
        keys = [p for p in model.parameters()]
        reloaded(model)
        kept = all(one is other for one, other in zip(keys, model.parameters(), strict=True))
        if kept:
            train_on(model, optimizer, 2)
        else:
            with pytest.raises(bf.ArgumentError, match="belongs to none of the models"):
                optimizer.add_param_group({"params": [keys[0].clone().detach().requires_grad_()]})

    LoopbackWorld(RANKS).run(case)


@every_method
def test_freezing_and_thawing(method):
    """Parameters that change ``requires_grad`` join and leave the buckets on all ranks alike."""

    def case():
        model = mlp(0 if method == "gradient_allreduce" else bf.rank())
        model[0].requires_grad_(False)
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            method,
            topology=GRAPH,
            broadcast=False,
        )
        before = model[0].weight.detach().clone()
        train_on(model, optimizer, 2)
        assert torch.equal(before, model[0].weight)
        model[0].requires_grad_(True)
        train_on(model, optimizer, 3)
        assert not torch.equal(before, model[0].weight)
        distance = bf.consensus_distance(model)
        model[2].requires_grad_(False)
        kept = model[2].weight.detach().clone()
        for parameter in model[2].parameters():
            parameter.grad = None
        train_on(model, optimizer, 2)
        assert torch.equal(kept, model[2].weight)
        return distance

    distances = LoopbackWorld(RANKS).run(case)
    assert distances == [distances[0]] * RANKS
    if method == "gradient_allreduce":
        assert distances[0] < 1e-12


@every_way
@pytest.mark.parametrize("through", ["wrapper", "plain"])
def test_parameter_groups(method, options, through):
    """Groups keep their own options, and may be added on the way, on either optimizer."""

    def case():
        model = mlp(0 if method == "gradient_allreduce" else bf.rank())
        plain = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.05}], lr=0.1)
        optimizer = bf.DistributedOptimizer(
            plain, model, method, topology=GRAPH, **options, broadcast=False
        )
        head = vector(model[2])
        train_on(model, optimizer, 2)
        assert torch.equal(head, vector(model[2]))
        {"wrapper": optimizer, "plain": plain}[through].add_param_group(
            {"params": model[2].parameters(), "weight_decay": 0.1}
        )
        for parameter in model.parameters():
            parameter.grad = None
        train_on(model, optimizer, 2, first=2)
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.1]
        return vector(model)

    got = LoopbackWorld(RANKS).run(case)
    early = vector(mlp(0)[0]).numel()

    def in_a_group(step):
        return torch.arange(vector(mlp(0)).numel()) < (early if step < 2 else 1000)

    assert_all_close(got, train_by_matrix(method, GRAPH, Late, 4, travels=in_a_group))


def test_a_group_of_strangers_is_refused_and_not_kept():
    """The message names the parameter; the optimizer is as it was."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, topology=GRAPH)
        stranger = torch.zeros(3, requires_grad=True)
        words = r"parameter 0 of group 1, of shape \(3,\), belongs to none of the models"
        with pytest.raises(bf.ArgumentError, match=words):
            optimizer.add_param_group({"params": [stranger]})
        train_on(model, optimizer, 2)
        assert len(optimizer.param_groups) == 1

    LoopbackWorld(RANKS).run(case)


def test_two_models_in_one_optimizer():
    """A list of models; the first forward of either starts the round."""

    def case():
        models = [mlp(bf.rank()), mlp(bf.rank() + 10)]
        plain = sgd([p for model in models for p in model.parameters()])
        optimizer = bf.DistributedOptimizer(
            plain, models, algorithm="adapt_with_combine", topology=GRAPH, broadcast=False
        )
        for step in range(2):
            optimizer.zero_grad()
            sum(square_loss(model, batch(bf.rank(), step)) for model in models).backward()
            optimizer.step()
        return torch.cat([vector(model) for model in models]), optimizer.round

    got = LoopbackWorld(RANKS).run(case)
    first = train_by_matrix("adapt_with_combine", GRAPH, sgd, 2)
    assert_all_close([v[: len(first[0])] for v, _ in got], first)
    assert [count for _, count in got] == [2] * RANKS


def test_two_optimizers_of_one_model():
    """Each looks after its own parameters, under names that do not collide."""

    def case():
        model = mlp(bf.rank())
        optimizers = [
            bf.DistributedOptimizer(
                sgd(part.parameters()), model, method, topology=GRAPH, broadcast=False
            )
            for part, method in ((model[0], "adapt_with_combine"), (model[2], "adapt_then_combine"))
        ]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [optimizer.round for optimizer in optimizers]

    assert LoopbackWorld(RANKS).run(case) == [[3, 3]] * RANKS


@every_method
def test_wrapping_anew_takes_over(method):
    """A second wrapper of the same parameters silences the first one's hooks."""

    def case():
        model = mlp(0 if method == "gradient_allreduce" else bf.rank())
        old = bf.DistributedOptimizer(
            sgd(model.parameters()), model, method, topology=GRAPH, broadcast=False
        )
        plain = sgd(model.parameters())
        optimizer = bf.DistributedOptimizer(plain, model, method, topology=GRAPH, broadcast=False)
        train_on(model, optimizer, 4)
        assert (old.round, optimizer.round) == (0, 4)
        result = vector(model)
        train_on(model, old, 1)
        assert old.round == 1
        return result

    assert_all_close(LoopbackWorld(RANKS).run(case), train_by_matrix(method, GRAPH, sgd, 4))


@every_method
def test_a_dropped_wrapper_is_gone(method):
    """No cycle keeps it alive, and what is left on the model is silent."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(sgd(model.parameters()), model, method, topology=GRAPH)
        train_on(model, optimizer, 1)
        gone = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert gone() is None
        finally:
            gc.enable()
        assert not model._forward_pre_hooks
        if bf.rank() == 0:
            square_loss(model, batch(0, 0)).backward()

    LoopbackWorld(RANKS).run(case)


def test_copies_of_the_model_leave_the_optimizer_behind():
    """deepcopy and pickle work; a copy's forward pass starts no round."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()), model, algorithm="adapt_with_combine", topology=GRAPH
        )
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        if bf.rank() == 0:
            for other in copies:
                square_loss(other, batch(0, 0)).backward()
                assert torch.equal(vector(other), vector(model))
        train_on(model, optimizer, 2)
        assert optimizer.round == 2
        with pytest.raises(TypeError, match="keep its state_dict"):
            copy.deepcopy(optimizer)

    LoopbackWorld(RANKS).run(case)


# compiled models


def compiled(method, given, backend):
    torch._dynamo.reset()
    model = mlp(0 if method == "gradient_allreduce" else bf.rank())
    fast = torch.compile(model, backend=backend)
    owner = {"compiled": fast, "plain": model}[given]
    optimizer = bf.DistributedOptimizer(
        sgd(model.parameters()),
        owner,
        method,
        topology=topology.one_peer_exponential(bf.size()),
        broadcast=False,
    )
    for step in range(3):
        optimizer.zero_grad()
        square_loss(fast, batch(bf.rank(), step)).backward()
        optimizer.step()
    return vector(model)
