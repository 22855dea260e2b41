"""``QAdamOptimizer``: torch's Adam in the warm-up, the written formula in the second stage."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import asyncddp as bf

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


def parameters(dtype=torch.float64, seed=0):
    """Three tensors of unlike shapes, one of which has no elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (5,), (), (0, 2)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def give(held, step, rank=0):
    """Gradients that step, rank and place determine, of unlike sizes."""
    for place, parameter in enumerate(held):
        generator = torch.Generator().manual_seed(1000 * place + step + 100_000 * rank)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = drawn * 10.0 ** (step % 3 - 1)


def average(optimizer, held):
    """What whoever averages does on a single rank: momentum takes the gradients' place."""
    for parameter in held:
        if not optimizer.warming_up(parameter):
            parameter.grad = optimizer.next_momentum(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_warm_up_longer_than_training_is_adam(dtype, decoupled):
    """Bit for bit Adam with L2 decay, or AdamW, in the forms that torch has for many tensors."""
    ours, theirs = parameters(dtype), parameters(dtype)
    mine = bf.QAdamOptimizer(ours, warmup_steps=21, decoupled_weight_decay=decoupled, **OPTIONS)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torchs = kind(theirs, foreach=True, **OPTIONS)
    for step in range(20):
        assert all(mine.warming_up(parameter) for parameter in ours)
        give(ours, step)
        give(theirs, step)
        mine.step()
        torchs.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(mine.state[one][key], torchs.state[other][key])


def test_a_thousand_steps_as_adam():
    """Loss and parameters of a net equal Adam's with L2 decay to 1e-6."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))
    other = copy.deepcopy(net)
    data, wanted = torch.randn(64, 2), torch.rand(64, 4)
    mine = bf.QAdamOptimizer(net.parameters(), lr=1e-3, warmup_steps=1001, weight_decay=0.01)
    torchs = torch.optim.Adam(other.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(1000):
        losses = []
        for model, optimizer in ((net, mine), (other, torchs)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(
                model(data[step % 16 :: 16]), wanted[step % 16 :: 16]
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, another in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=0, atol=1e-6)


def by_formula(start, gradients, warmup, lr, betas, eps, weight_decay, frozen, decoupled):
    """One number after some steps, as the formulas of the two stages are written."""
    x, m, v = start, 0.0, 0.0
    beta1, beta2 = betas
    for s, g in enumerate(gradients, start=1):
        if decoupled:
            x *= 1 - lr * weight_decay
        if s < warmup and not decoupled:
            g += weight_decay * x
        m = beta1 * m + (1 - beta1) * g
        if s < warmup:
            v = beta2 * v + (1 - beta2) * g**2
        count = min(s, warmup - 1) if frozen else s
        x -= lr / (1 - beta1**s) * m / (math.sqrt(v) / math.sqrt(1 - beta2**count) + eps)
    return x, m, v


@pytest.mark.parametrize("warmup", [2, 3, 8])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("in_grad", [False, True])
def test_the_formula(warmup, frozen, decoupled, in_grad):
    """Both stages, every option; momentum of the optimizer's own equals momentum that it finds."""
    held = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    optimizer = bf.QAdamOptimizer(
        [held],
        warmup_steps=warmup,
        freeze_bias_correction=frozen,
        decoupled_weight_decay=decoupled,
        grad_holds_momentum=in_grad,
        **OPTIONS,
    )
    numbers = []
    for step in range(11):
        give([held], step)
        numbers.append(float(held.grad))
        if in_grad:
            average(optimizer, [held])
        optimizer.step()
    x, m, v = by_formula(1.5, numbers, warmup, **OPTIONS, frozen=frozen, decoupled=decoupled)
    assert held.item() == pytest.approx(x, rel=1e-12)
    state = optimizer.state[held]
    assert float(state["exp_avg"]) == pytest.approx(m, rel=1e-12)
    assert float(state["exp_avg_sq"]) == pytest.approx(v, rel=1e-12)


def test_the_second_stage_takes_grad_as_it_is():
    """From step W on exp_avg is p.grad bit for bit, exp_avg_sq that of step W - 1, grad is kept."""
    ours = parameters(torch.float32)
    optimizer = bf.QAdamOptimizer(ours, warmup_steps=3, **OPTIONS)
    squares = []
    for step in range(1, 6):
        give(ours, step)
        given = [parameter.grad.clone() for parameter in ours]
        assert [optimizer.warming_up(parameter) for parameter in ours] == [step < 3] * 4
        optimizer.step()
        means = [optimizer.state[parameter]["exp_avg"] for parameter in ours]
        assert all(map(torch.equal, given, means)) is (step >= 3)
        assert all(map(torch.equal, given, (parameter.grad for parameter in ours)))
        squares.append([optimizer.state[one]["exp_avg_sq"].clone() for one in ours])
    assert not torch.equal(squares[0][0], squares[1][0])
    for later in squares[2:]:
        assert all(map(torch.equal, squares[1], later))


def two_ranks_training(steps, warmup):
    """Ranks with data of their own; gradients are averaged first, then momentum."""
    held = parameters()
    optimizer = bf.QAdamOptimizer(held, warmup_steps=warmup, lr=0.02)
    for step in range(steps):
        give(held, step, rank=bf.rank())
        average(optimizer, held)
        for place, parameter in enumerate(held):
            bf.allreduce_(parameter.grad, name=f"gradient {place}")
        optimizer.step()
    return [parameter.detach() for parameter in held]


def test_averaged_momentum_is_the_momentum_of_averaged_gradients():
    """Without compression two ranks train as one that has both gradients, through both stages."""
    with bf.local_world(2) as world:
        first, second = world.run(two_ranks_training, 9, 4)
    assert all(map(torch.equal, first, second))
    alone = parameters()
    optimizer = bf.QAdamOptimizer(alone, warmup_steps=4, lr=0.02, grad_holds_momentum=False)
    for step in range(9):
        give(alone, step, rank=1)
        others = [parameter.grad for parameter in alone]
        give(alone, step, rank=0)
        for parameter, gradient in zip(alone, others, strict=True):
            parameter.grad = (parameter.grad + gradient) / 2
        optimizer.step()
    for one, other in zip(alone, first, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("saved_after", [2, 3, 4, 6])
def test_resuming_in_both_stages(saved_after):
    """state_dict and load_state_dict: the rest of the run is the same bit for bit."""
    ours = parameters()
    optimizer = bf.QAdamOptimizer(ours, warmup_steps=4, **OPTIONS)
    for step in range(saved_after):
        give(ours, step)
        average(optimizer, ours)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]
    resumed = bf.QAdamOptimizer(theirs)
    resumed.load_state_dict(saved)
    for step in range(saved_after, 9):
        for held, one in ((ours, optimizer), (theirs, resumed)):
            give(held, step)
            average(one, held)
            one.step()
    assert all(map(torch.equal, ours, theirs))
    assert resumed.param_groups[0]["warmup_steps"] == 4


def test_a_parameter_without_gradients_goes_on_warming_up():
    """Each parameter counts its own steps, so that v is known before it is frozen."""
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = bf.QAdamOptimizer([first, second], lr=0.1, warmup_steps=2)
    for step in range(3):
        first.grad = torch.ones(1)
        second.grad = torch.ones(1) if step == 2 else None
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (first, second)] == [3, 1]
    assert not optimizer.warming_up(first)
    assert not optimizer.warming_up(second)
    assert second.item() == pytest.approx(0.9)


def test_groups_with_options_of_their_own():
    """Each group has its warm-up, and one that is added later is found."""
    first, second = parameters(seed=1), parameters(seed=2)
    optimizer = bf.QAdamOptimizer(first, lr=0.01, warmup_steps=2)
    assert optimizer.warming_up(first[0])
    optimizer.add_param_group({"params": second, "warmup_steps": 5, "lr": 0.1})
    for step in range(4):
        for held in (first, second):
            give(held, step)
            average(optimizer, held)
        optimizer.step()
    for seed, held, options in ((1, first, (0.01, 2)), (2, second, (0.1, 5))):
        alone = parameters(seed=seed)
        other = bf.QAdamOptimizer(alone, *options)
        for step in range(4):
            give(alone, step)
            average(other, alone)
            other.step()
        assert all(map(torch.equal, alone, held))


def test_a_copy_and_a_scheduler():
    """The optimizer can be copied, and its step size scheduled."""
    held = parameters()
    optimizer = bf.QAdamOptimizer(held, lr=0.1, warmup_steps=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    give(held, 0)
    optimizer.step()
    scheduler.step()
    copied = copy.deepcopy(optimizer)
    (parameter, *_) = copied.param_groups[0]["params"]
    assert copied.param_groups[0]["lr"] == 0.05
    assert not copied.warming_up(parameter)
    assert int(copied.state[parameter]["step"]) == 1


def test_inside_the_wrapper():
    """The wrapper takes it as it takes torch's own; its two questions are answered there too."""

    def case():
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        optimizer = bf.QAdamOptimizer(model.parameters(), lr=0.1, grad_holds_momentum=False)
        optimizer = bf.DistributedOptimizer(optimizer, model, "gradient_allreduce")
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return optimizer.warming_up(model.weight), optimizer.next_momentum(model.weight).shape

    with bf.local_world(2) as world:
        assert world.run(case) == [(True, (2, 3))] * 2


def test_defaults_are_those_of_bagua():
    """γ = 1e-3, W = 100, β = (0.9, 0.999), ε = 1e-8, λ = 0; every option is off."""
    assert bf.QAdamOptimizer(parameters()).defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 100,
        "freeze_bias_correction": False,
        "decoupled_weight_decay": False,
        "grad_holds_momentum": True,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "argument lr: expected at least 0, got -0.1"),
        ({"eps": float("nan")}, "argument eps: expected at least 0, got nan"),
        ({"weight_decay": -1.0}, "argument weight_decay: expected at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"argument betas: .*below 1, got \(0.9, 1.0\)"),
        ({"warmup_steps": 0}, "argument warmup_steps: .*at least 2, got 0"),
        ({"warmup_steps": 1}, "argument warmup_steps: .*at least 2, got 1"),
        ({"warmup_steps": -3}, "argument warmup_steps: .*at least 2, got -3"),
        ({"warmup_steps": 2.5}, "argument warmup_steps: .*at least 2, got 2.5"),
    ],
)
def test_values_that_cannot_be(options, words):
    """A ``ValueError`` too: which argument, what was expected, what was given."""
    with pytest.raises(ValueError, match=f"^QAdamOptimizer: {words}") as caught:
        bf.QAdamOptimizer(parameters(), **options)
    assert isinstance(caught.value, bf.ArgumentError)


def test_parameters_of_which_nothing_can_be_said():
    """Strangers are named by what is wrong; a gradient that is None counts as zero."""
    held = parameters()
    optimizer = bf.QAdamOptimizer(held)
    with pytest.raises(bf.ArgumentError, match=r"expected one of the optimizer's own.*\(7,\)"):
        optimizer.warming_up(torch.ones(7))
    assert torch.equal(optimizer.next_momentum(held[0]), torch.zeros_like(held[0]))


def test_sparse_gradients_are_refused():
    """Before anything has moved."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = bf.QAdamOptimizer(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(bf.ArgumentError, match=r"^QAdamOptimizer: the gradient .*sparse_coo"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert not optimizer.state
