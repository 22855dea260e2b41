"""``AccumAdam`` and ``AccumAdamW``: torch's Adam for K = 1, the written formula for every K."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import asyncddp as bf
from asyncddp.optim.parameter_sync import broadcast_parameters

both = pytest.mark.parametrize("kind", ["AccumAdam", "AccumAdamW"])
TORCHS = {"AccumAdam": torch.optim.Adam, "AccumAdamW": torch.optim.AdamW}


def parameters(dtype=torch.float64, seed=0):
    """Three tensors of unlike shapes, one of which has no elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (5,), (), (0, 2)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def gradient(parameter, step, place=0):
    """Reproducible gradients of unlike sizes."""
    generator = torch.Generator().manual_seed(1000 * place + step)
    values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return values * 10.0 ** (step % 3 - 1)


def give(held, step):
    for place, parameter in enumerate(held):
        parameter.grad = gradient(parameter, step, place)


@both
@pytest.mark.parametrize(
    ("dtype", "foreach"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.float64, False),
        (torch.float64, True),
        (torch.bfloat16, True),
        (torch.complex64, True),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_gradient_in_a_mean_is_torchs_own(kind, dtype, foreach, weight_decay):
    """K = 1: parameters and moments equal those of ``torch.optim`` bit for bit.

    Where torch's two forms round differently, halves and complex numbers, those of ``foreach``.
    """
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": weight_decay}
    ours, theirs = parameters(dtype), parameters(dtype)
    mine = getattr(bf, kind)(ours, accum_iter=1, **options)
    torchs = TORCHS[kind](theirs, foreach=foreach, **options)
    for step in range(12):
        give(ours, step)
        give(theirs, step)
        mine.step()
        torchs.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(mine.state[one][key], torchs.state[other][key])


def by_formula(start, gradients, every, lr, betas, eps, decay, decoupled):
    """One number after some steps, as the moments are written in the method's source.

    There m and v are kept already multiplied by β for the step to come.
    """
    x, m, v, a = start, 0.0, 0.0, 0.0
    beta1, beta2 = betas
    for t, g in enumerate(gradients, start=1):
        if decoupled:
            x = (1 - lr * decay) * x
        else:
            g += decay * x
        a += g / every
        mean, square = m + (1 - beta1) * g, v + (1 - beta2) * g**2
        k = math.ceil(t / every)
        root = math.sqrt(square) / math.sqrt(1 - beta2**k)
        x -= lr / (1 - beta1**k) * mean / (root + eps)
        if t % every == 0:
            m, v, a = beta1 * (m + (1 - beta1) * a), beta2 * (v + (1 - beta2) * a**2), 0.0
    return x


@both
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_the_formula(kind, every):
    """Every K, over several windows and a part of one."""
    options = {"lr": 0.05, "betas": (0.9, 0.98), "eps": 1e-8}
    held = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    optimizer = getattr(bf, kind)([held], weight_decay=0.1, accum_iter=every, **options)
    gradients = [gradient(held, step) for step in range(11)]
    for value in gradients:
        held.grad = value.clone()
        optimizer.step()
    numbers = [float(value) for value in gradients]
    expected = by_formula(1.5, numbers, every, **options, decay=0.1, decoupled=kind == "AccumAdamW")
    assert held.item() == pytest.approx(expected, rel=1e-12)


@both
def test_moments_move_once_in_k_steps(kind):
    """Within a window the moments stand still, and the sum grows; at its end the sum is zero."""
    held = torch.ones(3, requires_grad=True)
    optimizer = getattr(bf, kind)([held], lr=0.1, weight_decay=0.0, accum_iter=3)
    seen = []
    for _ in range(4):
        held.grad = torch.full((3,), 3.0)
        optimizer.step()
        state = optimizer.state[held]
        seen.append([float(state[key][0]) for key in ("exp_avg", "accum_grad")])
    mean = 0.1 * 3.0
    assert seen == [pytest.approx(pair) for pair in [[0, 1], [0, 2], [mean, 0], [mean, 1]]]


def test_defaults_are_those_of_the_source():
    """γ = 1e-3, β = (0.9, 0.999), ε = 1e-8, K = 4; λ = 1/32768, and 0 with decoupled decay."""
    plain = bf.AccumAdam(parameters()).defaults
    assert plain == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1 / 32768,
        "accum_iter": 4,
    }
    assert bf.AccumAdamW(parameters()).defaults == {**plain, "weight_decay": 0.0}


@both
def test_a_parameter_without_gradient_stays_out(kind):
    """Its count stands still, so that its window does."""
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = getattr(bf, kind)([first, second], lr=0.1, accum_iter=2)
    for step in range(3):
        first.grad = torch.ones(1)
        second.grad = torch.ones(1) if step == 1 else None
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (first, second)] == [3, 1]
    assert float(optimizer.state[second]["exp_avg"]) == 0.0


@both
def test_closures(kind):
    """step(closure) evaluates once, with gradients enabled, and gives the loss."""
    held = torch.full((2,), 2.0, requires_grad=True)
    optimizer = getattr(bf, kind)([held], lr=0.1, weight_decay=0.0)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = held.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert float(loss.detach()) == 8.0
    torch.testing.assert_close(held.detach(), torch.full((2,), 1.9))
    assert optimizer.step() is None


@both
def test_resuming_in_the_middle_of_a_window(kind):
    """state_dict and load_state_dict: the rest of the run is the same bit for bit."""
    ours = parameters()
    optimizer = getattr(bf, kind)(ours, lr=0.05, weight_decay=0.1, accum_iter=3)
    for step in range(4):
        give(ours, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]
    resumed = getattr(bf, kind)(theirs, accum_iter=8)
    resumed.load_state_dict(saved)
    for step in range(4, 9):
        for held, one in ((ours, optimizer), (theirs, resumed)):
            give(held, step)
            one.step()
    assert all(map(torch.equal, ours, theirs))
    assert resumed.param_groups[0]["accum_iter"] == 3
    assert {state["step"].dtype for state in resumed.state.values()} == {torch.int64}


@both
def test_groups_with_options_of_their_own(kind):
    """Each group has its step size, decay and K."""
    first, second = parameters(seed=1), parameters(seed=2)
    both_at_once = getattr(bf, kind)(
        [{"params": first, "lr": 0.1}, {"params": second, "accum_iter": 2, "weight_decay": 0.5}],
        lr=0.01,
    )
    for step in range(5):
        give(first, step)
        give(second, step)
        both_at_once.step()
    for seed, held, options in ((1, first, {"lr": 0.1}), (2, second, {"lr": 0.01})):
        alone = parameters(seed=seed)
        if seed == 2:
            options = {**options, "accum_iter": 2, "weight_decay": 0.5}
        optimizer = getattr(bf, kind)(alone, **options)
        for step in range(5):
            give(alone, step)
            optimizer.step()
        assert all(map(torch.equal, alone, held))


def wrapped_training():
    """Four steps of AccumAdam inside the wrapper; ranks start alike, and have equal data."""
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    broadcast_parameters(model)
    plain = copy.deepcopy(model)
    optimizer = bf.AccumAdam(model.parameters(), lr=0.1, accum_iter=2)
    optimizer = bf.DistributedOptimizer(optimizer, model, "adapt_then_combine")
    alone = bf.AccumAdam(plain.parameters(), lr=0.1, accum_iter=2)
    for step in range(4):
        x = gradient(torch.empty(5, 3, dtype=torch.float64), step)
        for held, one in ((model, optimizer), (plain, alone)):
            one.zero_grad()
            held(x).square().mean().backward()
            one.step()
    bf.broadcast_optimizer_state(optimizer)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    return steps


def test_inside_the_wrapper():
    """The wrapper takes it as it takes torch's own."""
    with bf.local_world(2) as world:
        assert world.run(wrapped_training) == [{4}, {4}]


@both
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "argument lr: expected at least 0, got -0.1"),
        ({"eps": float("nan")}, "argument eps: expected at least 0, got nan"),
        ({"weight_decay": -1.0}, "argument weight_decay: expected at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"argument betas: .*below 1, got \(0.9, 1.0\)"),
        ({"accum_iter": 0}, "argument accum_iter: .*at least 1, got 0"),
        ({"accum_iter": 2.0}, "argument accum_iter: .*at least 1, got 2.0"),
        ({"accum_iter": True}, "argument accum_iter: .*at least 1, got True"),
    ],
)
def test_values_that_cannot_be(kind, options, words):
    """Which argument, what was expected, what was given."""
    with pytest.raises(bf.ArgumentError, match=f"^{kind}: {words}"):
        getattr(bf, kind)(parameters(), **options)


@both
def test_sparse_gradients_are_refused(kind):
    """Before anything has moved."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = getattr(bf, kind)(table.parameters())
    table(torch.tensor([1])).sum().backward()
    words = rf"^{kind}: the gradient of a parameter of shape \(4, 2\) is torch.sparse_coo; .*dense"
    with pytest.raises(bf.ArgumentError, match=words):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert not optimizer.state
