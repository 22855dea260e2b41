"""Models that ``torch.compile`` compiles train as plain ones do, in every phase and wrapper."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import asyncddp as bf
from tests.support import on

pytestmark = pytest.mark.training

STEPS = 4
BY_OPTIMIZER = {
    "after_step": ("adapt_then_combine", {}),
    "update_in_backward": ("adapt_then_combine", {"update_in_backward": True}),
    "before_forward": ("adapt_with_combine", {}),
    "before_forward, every second step": (
        "adapt_with_combine",
        {"num_steps_per_communication": 2},
    ),
    "gradient_ready": ("gradient_allreduce", {}),
    "gradient_ready, of two passes": ("gradient_allreduce", {"num_steps_per_communication": 2}),
    "moments": ("gradient_tracking", {}),
    "by the clock": ("async_model_average", {"sync_interval_ms": 1}),
    "through_step": ("async_model_average", {}),
    "after_biased_step": ("push_sum", {}),
    "window": ("win_put", {}),
}
BY_MODULE = {
    "buckets": ("adapt_with_combine", {}),
    "buckets, asynchronous": ("adapt_with_combine", {"sync": False}),
    "after_step": ("adapt_then_combine", {}),
    "gradient_ready": ("gradient_allreduce", {}),
    "window": ("win_put", {}),
}
IN_TURNS = ("win_put", "push_sum", "async_model_average")
"""Methods with which one rank steps after the other, so that the models are always the same."""
BY_CLOCK = "sync_interval_ms"
"""Option of averages at any time, which change nothing where all ranks have the same data."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                shape, count = parameter.shape, parameter.numel()
                parameter.data = torch.linspace(-1, 1, count, dtype=torch.float64).view(shape)

    def forward(self, x):
        return self.head(self.inner(x))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def prepare(way, backend):
    """Make a model, and what to give to the wrapper."""
    torch._dynamo.reset()
    model = Net()
    if way == "in place":
        model.compile(backend=backend)
    return model, torch.compile(model, backend=backend) if way == "function" else model


def train(step, options, turns_from=STEPS):
    """Make steps with data of this rank's own, in turns or together, or with the same data.

    Before turns begin equal models stay equal.
    """
    for number in range(STEPS):
        seed = number if BY_CLOCK in options else 100 * number + bf.rank()
        data = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        scale = 0.0 if number < turns_from < STEPS else 1.0
        for rank in range(bf.size()) if number >= turns_from else [bf.rank()]:
            bf.barrier()
            if rank == bf.rank():
                step(data, scale)
        bf.barrier()


def vector(model):
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def by_optimizer(way, backend, method, options):
    model, used = prepare(way, backend)
    given = model if way == "after the wrapper" else used
    optimizer = bf.DistributedOptimizer(sgd(model.parameters()), given, method, **options)
    if way == "after the wrapper":
        used = torch.compile(model, backend=backend)

    def step(data, scale):
        optimizer.zero_grad()
        (scale * used(data).square().mean()).backward()
        optimizer.step()

    train(step, options, 0 if method in IN_TURNS and BY_CLOCK not in options else STEPS)
    return vector(model)


def by_module(way, backend, method, options):
    model, given = prepare(way, backend)
    ddp = bf.DecentralizedDataParallel(
        given, lambda named: sgd([parameter for _, parameter in named]), algorithm=method, **options
    )
    used = torch.compile(ddp, backend=backend) if way == "after the wrapper" else ddp

    def step(data, scale):
        (scale * used(data).square().mean()).backward()

    # the end of the first backward pass is collective
    train(step, options, 1 if method in IN_TURNS or "sync" in options else STEPS)
    ddp.eval(average=False)
    result = vector(model)
    ddp.close()
    return result


def compared(trained, way, backend, method, options):
    """Train as it is and compiled; return how far apart, and whether anything was compiled."""
    from torch._dynamo.utils import counters  # which takes long to import

    plain = trained("plain", backend, method, options)
    counters.clear()
    fast = trained(way, backend, method, options)
    return (fast - plain).abs().max().item(), counters["frames"]["ok"] > 0


WAYS = ("function", "in place", "after the wrapper")


def cases(phases):
    """Each phase compiled in one way, in turn, and the first of them in all ways."""
    rows = [(phase, WAYS[number % len(WAYS)]) for number, phase in enumerate(phases)]
    first = next(iter(phases))
    return pytest.mark.parametrize(("phase", "way"), [*((first, way) for way in WAYS[1:]), *rows])


def assert_same(world, *case, limit=120.0):
    apart = world.run(compared, *case, limit=limit)
    assert all(far < 1e-12 and compiled for far, compiled in apart), apart


@on("shared_memory-2")
@cases(BY_OPTIMIZER)
def test_optimizer(world, phase, way):
    """The wrapper may be given what ``torch.compile`` returns, or the model, before or after."""
    assert_same(world, by_optimizer, way, "aot_eager", *BY_OPTIMIZER[phase])


@on("shared_memory-2")
@cases(BY_MODULE)
def test_module(world, phase, way):
    """The model may be compiled before it is wrapped, or the wrapper."""
    assert_same(world, by_module, way, "aot_eager", *BY_MODULE[phase])


@pytest.mark.nightly
@on("shared_memory-2")
@pytest.mark.parametrize(("trained", "way"), [(by_optimizer, "function"), (by_module, "in place")])
def test_compiled_to_machine_code(world, trained, way):
    """By inductor, which fuses what backward hooks stand between."""
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    assert_same(world, trained, way, "inductor", "adapt_with_combine", {}, limit=300.0)
