"""``fuse_optimizer``: ``fuse_step()`` gives what ``step()`` gives, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp.optim import parameter_runs
from tests.support import LoopbackWorld
from tests.unit.optim.optim_reference import batch, mlp, square_loss, vector

optim = torch.optim
CONFIGURATIONS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "sgd nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "sgd foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, lr=0.01),
    "adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam foreach": partial(optim.Adam, lr=0.01, foreach=True),
    "adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01),
    "adamw amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    "adamax": partial(optim.Adamax, lr=0.01, weight_decay=0.1),
    "nadam": partial(optim.NAdam, lr=0.01),
    "nadam decoupled": partial(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": partial(optim.RAdam, lr=0.01, weight_decay=0.1),
    "adagrad": partial(optim.Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.5, weight_decay=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.01),
    "rmsprop centered": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01, t0=5, weight_decay=0.1),
    "accum adam": partial(bf.AccumAdam, lr=0.01, accum_iter=3),
    "accum adamw": partial(bf.AccumAdamW, lr=0.01, accum_iter=2),
    "qadam": partial(bf.QAdamOptimizer, lr=0.01, warmup_steps=30),
}
every = pytest.mark.parametrize("make", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
ROUNDED = {torch.float32: 1e-5, torch.float64: 1e-14, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Tolerances where torch's kernels round the last elements of a tensor otherwise than the rest."""


class Net(torch.nn.Module):
    """Parameters of many shapes: odd sizes, one element, no dimension, not contiguous, frozen."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = [(7, 13), (33,), (1,), (), (0, 3), (64, 3), (5,), (16,), (2, 3, 4, 5), (100,)]
        self.held = torch.nn.ParameterList(
            torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes
        )
        square = self.held[8]
        square.data = square.data.to(memory_format=torch.channels_last)
        self.frozen = torch.nn.Parameter(torch.ones(9, dtype=dtype), requires_grad=False)


def give(model, step, keep=False):
    """Gradients of unlike sizes, new tensors or into those that are there; one is often missing."""
    for place, parameter in enumerate(model.held):
        generator = torch.Generator().manual_seed(1000 * place + step)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        drawn *= 10.0 ** (step % 3 - 1)
        if place == 5 and step % 4 == 1:
            parameter.grad = None
        elif keep and parameter.grad is not None:
            parameter.grad.copy_(drawn)
        else:
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


def pair(make, dtype=torch.float32, **options):
    """A model with a fused optimizer and one with a plain one."""
    ours, theirs = Net(dtype), Net(dtype)
    return (
        ours,
        bf.fuse_optimizer(make(ours.parameters()), **options),
        theirs,
        make(theirs.parameters()),
    )


def assert_same(ours, mine, theirs, plain, exact=True):
    """Parameters and every entry of the state are equal, bit for bit where kernels allow it."""
    exact = exact and not mine.defaults.get("fused")

    def assert_equal(one, other):
        tolerance = 0.0 if exact else ROUNDED[one.dtype]
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_equal(one, other)
    first, second = mine.state_dict(), plain.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for place, state in first["state"].items():
        assert state.keys() == second["state"][place].keys()
        for key, value in state.items():
            other = second["state"][place][key]
            if isinstance(value, torch.Tensor):
                assert_equal(value, other)
                assert value.stride() == other.stride()
            else:
                assert value == other


def fused_steps(seen):
    """Have the sizes of tensors that a step updates written down."""

    def note(optimizer, args, kwargs):
        seen.append([one.numel() for group in optimizer.param_groups for one in group["params"]])

    return note


@every
def test_fused_steps_are_steps(make):
    """41 steps, every other one fused: parameters and state are those of ``step()``.

    Gradients are new tensors in the first half, and copied into those that are there in the other.
    """
    ours, mine, theirs, plain = pair(make)
    for step in range(41):
        for model in (ours, theirs):
            give(model, step, keep=step > 20)
        (mine.step if step % 2 else mine.fuse_step)()
        plain.step()
        if step % 10 in (0, 1):
            assert_same(ours, mine, theirs, plain)
    assert_same(ours, mine, theirs, plain)


@every
def test_fused_steps_alone(make):
    """Fused from the first step to the last, which makes the state itself."""
    ours, mine, theirs, plain = pair(make, torch.float64)
    for step in range(12):
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
        assert_same(ours, mine, theirs, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sgd nesterov", "adam amsgrad"])
def test_halves(name, dtype):
    """Weights of two bytes are the same up to rounding, which torch does by place in a tensor."""
    options = {"eps": 1e-4} if name == "adam amsgrad" else {}
    ours, mine, theirs, plain = pair(partial(CONFIGURATIONS[name], **options), dtype)
    for step in range(6):
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
    assert_same(ours, mine, theirs, plain, exact=False)


def test_it_is_one_tensor_that_is_updated():
    """Nine parameters with gradients become one tensor; number and no elements stay apart."""
    ours, mine, _, _ = pair(CONFIGURATIONS["adam"])
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    for step in range(3):
        give(ours, 2 + 4 * step)
        mine.fuse_step()
    mine.step()
    sizes = [parameter.numel() for parameter in ours.parameters()]
    assert seen[-1] == sizes
    assert all(len(one) == 3 and max(one) >= sum(sizes) - 11 for one in seen[:-1]), seen


def test_a_missing_gradient_parts_the_run():
    """Parameters without a gradient are neither updated nor counted as updated."""
    ours, mine, theirs, plain = pair(CONFIGURATIONS["adam"])
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    for step in (1, 1, 1):
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
    assert ours.held[5] not in mine.state
    assert [len(sizes) for sizes in seen] == [4] * 3
    assert_same(ours, mine, theirs, plain)


def test_without_flattening_what_lies_together_is_one():
    """Weights and gradients that are views of two flat tensors are updated as one tensor."""
    flat, gradients = torch.randn(60), torch.randn(60)
    held = [torch.nn.Parameter(flat[begin : begin + 20]) for begin in (40, 0, 20)]
    plain_held = [parameter.detach().clone().requires_grad_() for parameter in held]
    apart = torch.nn.Parameter(torch.ones(20))
    mine = bf.fuse_optimizer(optim.Adam([*held, apart], lr=0.1), do_flatten=False)
    plain = optim.Adam(plain_held, lr=0.1)
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    for parameter, other, begin in zip(held, plain_held, (40, 0, 20), strict=True):
        parameter.grad = gradients[begin : begin + 20]
        other.grad = parameter.grad.clone()
    apart.grad = torch.ones(20)
    for _ in range(3):
        mine.fuse_step()
        plain.step()
    assert [sorted(sizes) for sizes in seen] == [[20, 60]] * 3
    assert all(map(torch.equal, held, plain_held))
    assert all(map(torch.equal, held, (flat[begin : begin + 20] for begin in (40, 0, 20))))
    buffers = {mine.state[parameter]["exp_avg"].untyped_storage().data_ptr() for parameter in held}
    assert len(buffers) == 1


@pytest.mark.parametrize("order", ["weights", "gradients", "moments"])
def test_what_lies_in_another_order_is_not_one(order):
    """Without flattening a run needs the same order everywhere; results are right in any case."""
    places = {kind: (0, 20, 40) for kind in ("weights", "gradients", "moments")}
    places[order] = (20, 0, 40)
    flats = {kind: torch.randn(60) for kind in places}
    parts = {kind: [flats[kind][at : at + 20] for at in where] for kind, where in places.items()}
    held = [torch.nn.Parameter(part) for part in parts["weights"]]
    mine = bf.fuse_optimizer(optim.SGD(held, lr=0.1, momentum=0.9), do_flatten=False)
    for parameter, gradient, moment in zip(held, parts["gradients"], parts["moments"], strict=True):
        parameter.grad, mine.state[parameter]["momentum_buffer"] = gradient, moment
    plain_held = [parameter.detach().clone().requires_grad_() for parameter in held]
    plain = optim.SGD(plain_held, lr=0.1, momentum=0.9)
    for parameter, other in zip(held, plain_held, strict=True):
        other.grad = parameter.grad.clone()
        moment = mine.state[parameter]["momentum_buffer"].clone()
        plain.state[other]["momentum_buffer"] = moment
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    mine.fuse_step()
    plain.step()
    assert seen == [[20, 20, 20]]
    assert all(map(torch.equal, held, plain_held))


@pytest.mark.parametrize("check", [False, True])
def test_parameters_that_were_moved(check):
    """With the check they move back and are one tensor again, without it they are right, too."""
    ours, mine, theirs, plain = pair(CONFIGURATIONS["adam"], check_flatten=check)
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    for step in (2, 3, 4):
        ours.held[1].data = ours.held[1].data.clone()
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
    assert [len(sizes) == 3 for sizes in seen] == [check] * 3
    assert_same(ours, mine, theirs, plain)


def test_another_dtype_and_new_parameters():
    """``model.to(dtype)`` and ``add_param_group`` make new flat memory."""
    ours, mine, theirs, plain = pair(CONFIGURATIONS["sgd momentum"])
    seen = []
    mine.register_step_pre_hook(fused_steps(seen))
    for model, optimizer in ((ours, mine), (theirs, plain)):
        model.to(torch.float64)
        extra = [torch.nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in (3, 5)]
        optimizer.add_param_group({"params": extra, "lr": 0.5})
        model.extra = torch.nn.ParameterList(extra)
    for step in (2, 3):
        for model in (ours, theirs):
            give(model, step)
            for parameter in model.extra:
                parameter.grad = torch.ones_like(parameter)
        mine.fuse_step()
        plain.step()
    assert [len(sizes) for sizes in seen] == [4, 4]
    assert_same(ours, mine, theirs, plain)


def test_resuming():
    """``state_dict`` goes between fused and plain optimizers in both directions."""
    ours, mine, theirs, plain = pair(CONFIGURATIONS["adam"])
    for step in range(4):
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
    first, second = copy.deepcopy(mine.state_dict()), copy.deepcopy(plain.state_dict())
    mine.load_state_dict(second)
    plain.load_state_dict(first)
    for step in range(4, 8):
        give(ours, step)
        give(theirs, step)
        mine.fuse_step()
        plain.step()
    assert_same(ours, mine, theirs, plain)


def test_training_with_a_schedule_and_closures():
    """A scheduler counts fused steps; closures are evaluated once, with gradients enabled."""
    models = [mlp(0), mlp(0)]
    optimizers = [optim.Adam(model.parameters(), lr=0.1) for model in models]
    bf.fuse_optimizer(optimizers[0])
    schedules = [optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]
    losses = []
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad(set_to_none=False)
                loss = square_loss(model, batch(0, step))
                loss.backward()
                return loss

            run = getattr(optimizer, "fuse_step", optimizer.step)
            losses.append(run(closure).item())
        for schedule in schedules:
            schedule.step()
    assert losses[::2] == losses[1::2]
    assert torch.equal(vector(models[0]), vector(models[1]))
    with torch.no_grad():
        assert optimizers[0].fuse_step() is None


def test_autograd_sees_the_change():
    """A backward pass through weights that a fused step has changed since is an error."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = bf.fuse_optimizer(optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_error_in_a_step_leaves_the_optimizer_whole():
    """Groups have their own parameters again, and no flat tensor stays in the state."""
    ours, mine, _, _ = pair(CONFIGURATIONS["adam"])
    before = list(mine.param_groups[0]["params"])

    def fail(*_):
        raise RuntimeError("HERE")

    give(ours, 2)
    mine.fuse_step()
    mine.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="HERE"):
        mine.fuse_step()
    assert all(
        one is other for one, other in zip(mine.param_groups[0]["params"], before, strict=True)
    )
    assert set(mine.state) <= set(before)


def test_memory_is_released():
    """A model and its fused optimizer leave nothing behind, and copies are plain optimizers."""
    ours, mine, _, _ = pair(CONFIGURATIONS["adam"])
    give(ours, 2)
    mine.fuse_step()
    assert not hasattr(copy.deepcopy(mine), "fuse_step")
    gone = weakref.ref(ours.held[1])
    del ours, mine
    gc.collect()
    assert gone() is None


def fused_training(method, do_flatten):
    """Six steps under the wrapper, four of them fused, and six plain ones."""
    make = partial(bf.QAdamOptimizer, warmup_steps=3) if method == "qadam" else optim.Adam
    results = []
    for fuse in (False, True):
        model = mlp(bf.rank())
        optimizer = make(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(optimizer, model, method, broadcast=False)
        if fuse:
            optimizer = bf.fuse_optimizer(optimizer, do_flatten=do_flatten)
        for step in range(6):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            (optimizer.fuse_step if fuse and step % 3 else optimizer.step)()
        results.append((vector(model), optimizer.round))
    return results


@pytest.mark.parametrize("do_flatten", [False, True])
@pytest.mark.parametrize(
    "method", ["adapt_then_combine", "adapt_with_combine", "gradient_allreduce", "qadam"]
)
def test_of_a_wrapper(method, do_flatten):
    """Fused steps of ``DistributedOptimizer`` average as its steps do, bit for bit."""
    for plain, fused in LoopbackWorld(2).run(fused_training, method, do_flatten):
        assert torch.equal(plain[0], fused[0])
        assert plain[1] == fused[1] > 0


def test_of_what_a_wrapper_wraps():
    """The wrapper does not hand out a fused step that would not average."""

    def case():
        model = mlp(0)
        inner = bf.fuse_optimizer(optim.SGD(model.parameters(), lr=0.1))
        optimizer = bf.DistributedOptimizer(inner, model)
        with pytest.raises(AttributeError, match=r"give the wrapper to fuse_optimizer\(\)"):
            optimizer.fuse_step()
        with pytest.raises(bf.ArgumentError, match="fuse it once"):
            bf.fuse_optimizer(optimizer)

    LoopbackWorld(1).run(case)


def test_twice_is_refused():
    """Double fusing raises, and the optimizer stays as it was."""
    _, mine, _, _ = pair(CONFIGURATIONS["sgd"])
    step = mine.fuse_step
    with pytest.raises(ValueError, match=r"argument opt: .* has a fuse_step\(\) already"):
        bf.fuse_optimizer(mine)
    assert mine.fuse_step is step


@pytest.mark.parametrize(
    "make",
    [
        optim.LBFGS,
        optim.Adafactor,
        optim.SparseAdam,
        partial(optim.Adam, differentiable=True),
        type("Mine", (optim.SGD,), {}),
    ],
)
def test_optimizers_that_cannot_be_fused(make):
    """Those that do not treat each element alone, and strangers of whom nobody knows."""
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(
        bf.ArgumentError, match=r"fuse_optimizer: argument opt: .* by itself .* got"
    ):
        bf.fuse_optimizer(make([parameter]))
    if isinstance(make, type) and make.__name__ == "Mine":
        bf.fuse_optimizer(make([parameter]), elementwise=True)


def test_sparse_gradients_are_updated_apart():
    """SGD takes them, beside dense ones that are fused."""
    models = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2)])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        run = bf.fuse_optimizer(optimizer).fuse_step if fuse else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            model[1](model[0](torch.tensor([1, 4, 1]))).square().sum().backward()
            run()
        models.append(vector(model))
    assert torch.equal(*models)


def test_runs_of_different_state_are_apart():
    """Parameters whose numbers of steps differ are not updated as one."""
    flat = torch.zeros(8)
    held = [torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])]
    gradients = torch.ones(8)
    held[0].grad, held[1].grad = gradients[:4], gradients[4:]
    states = {one: {"step": torch.tensor(1.0)} for one in held}
    assert len(parameter_runs.find_runs(held, states, 1)) == 1
    states[held[1]]["step"] += 1
    assert len(parameter_runs.find_runs(held, states, 1)) == 2


def test_weights_tied_by_storage_are_refused():
    """Flat memory would end the tie."""
    first, second = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    second.data = first.data.t()
    with pytest.raises(bf.ArgumentError, match=r"parameter . and parameter . share memory"):
        bf.fuse_optimizer(optim.SGD([first, second], lr=0.1))
