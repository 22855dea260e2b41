"""What a training loop computes is in the timeline: steps, passes, modules, updates."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import asyncddp as bf
from asyncddp.algorithms import span_recorders as recorded_passes
from asyncddp.algorithms import training_tracer as recorded
from asyncddp.algorithms.span_recorders import BackwardSpanRecorder, ForwardSpanRecorder
from asyncddp.algorithms.training_tracer import TrainingTracer
from asyncddp.timeline.trace_writer import TraceWriter
from asyncddp.timeline.tracer import Tracer
from tests.support.timelines import assert_nested, read, spans


class Net(torch.nn.Module):
    """Modules inside modules, one of them twice, and one that is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.again = torch.nn.Linear(4, 4)
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def forward(self, x):
        x = checkpoint(self.again, self.body(self.body(x)), use_reentrant=True)
        return self.head(x)


NAMES = {"body", "body.0", "body.1", "again", "head", "head.0", "head.1", "Net"}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(method, steps):
    """Train a small model with a method, as users do."""
    model = Net()
    options = {"update_in_backward": True} if method == "in backward" else {}
    algorithm = "adapt_then_combine" if method == "in backward" else method
    optimizer = bf.DistributedOptimizer(sgd(model), model, algorithm, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def train_module(steps):
    """Train a small model inside a wrapper."""

    def optim_fn(named):
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)

    ddp = bf.DecentralizedDataParallel(Net(), optim_fn)
    for _ in range(steps):
        ddp(torch.ones(2, 4)).sum().backward()


def trained(folder, case, *args, ranks=1):
    with bf.local_world(ranks, timeline=f"{folder}/") as world:
        world.run(case, *args)
    return [read(folder / f"rank{rank}.json") for rank in range(ranks)]


@pytest.mark.parametrize(
    "method",
    [
        "adapt_with_combine",
        "adapt_then_combine",
        "in backward",
        "gradient_allreduce",
        "win_put",
        "push_sum",
        "module",
    ],
)
def test_steps_passes_and_updates(method, tmp_path):
    """Of every method, nested, a span each; steps follow each other without a gap."""
    steps = 5
    case = (train_module, steps) if method == "module" else (train, method, steps)
    for events in trained(tmp_path, *case, ranks=2):
        assert_nested(events)
        noted = spans(events, "step")
        assert [event["args"]["step"] for event in noted] == list(range(steps))
        for before, after in pairwise(noted):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.002)
        assert len(spans(events, "forward", "Net")) == steps
        assert len(spans(events, "backward", "Net")) >= steps  # a checkpoint's ends it early
        assert len(spans(events, "optimizer")) >= steps
        assert {event["tid"] for event in (*noted, *spans(events, "forward"))} == {1}
        assert noted[2]["args"]["modules"]
        third = [
            event["name"]
            for cat in ("forward", "backward")
            for event in spans(events, cat)
            if noted[2]["ts"] <= event["ts"] < noted[2]["ts"] + noted[2]["dur"]
        ]
        assert set(third) == NAMES
        assert third.count("body.0") == 4  # called twice


def test_the_last_module_inside_is_not_lost_in_the_outer_one(tmp_path):
    """Both give the same tensor; the pass comes to both, and stays in the inner one."""
    writer = TraceWriter(tmp_path / "0.json", 0)
    tracer = Tracer(0, writer)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    backward = BackwardSpanRecorder(tracer)
    passing = ForwardSpanRecorder(tracer, model, backward)
    passing.begin(model, modules=True)
    y = model(torch.ones(1, 1))
    passing.end(y)
    y.backward()
    tracer.close()
    events = read(writer.path)
    durations = {event["name"]: event["dur"] for event in spans(events, "backward")}
    assert list(durations) == ["0.0", "0", "Sequential"]
    assert durations["0.0"] > 0
    assert_nested(events)


def test_modules_are_noted_in_so_many_steps_that_they_cost_a_share(tmp_path, monkeypatch):
    """A power of two, so that ranks whose costs differ a little note the same steps."""
    monkeypatch.setattr(recorded, "module_tracing_cost", lambda: 1e9)

    def case():
        train("adapt_then_combine", 5)

    (events,) = trained(tmp_path, case)
    (pace,) = [event for event in events if event["name"] == "asyncddp.modules"]
    every = pace["args"]["every"]
    assert every > 100
    assert every & (every - 1) == 0
    assert [event["args"]["modules"] for event in spans(events, "step")] == [
        *(False, False, True, False, False)
    ]


def test_modules_that_cost_nothing_are_noted_in_all_steps(tmp_path, monkeypatch):
    """From the first step on that shows what a step takes."""
    monkeypatch.setattr(recorded, "module_tracing_cost", lambda: 0.0)
    monkeypatch.setattr(Tracer, "cost", 0.0)
    (events,) = trained(tmp_path, train, "adapt_then_combine", 6)
    modules = [event["args"]["modules"] for event in spans(events, "step")]
    assert modules == [False, False, True, True, True, True]


def test_a_pass_leaves_no_hook_behind(tmp_path):
    """Not even one that fails: the next one removes them."""
    tracer = Tracer(0, None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    passing = ForwardSpanRecorder(tracer, model, BackwardSpanRecorder(tracer))
    hooks = torch.nn.modules.module._global_forward_hooks
    passing.begin(model, modules=True)
    assert hooks
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    passing.begin(model, modules=False)
    assert not hooks
    passing.end(model(torch.ones(2, 2)))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not model[0]._forward_hooks


def test_nothing_is_hooked_where_the_timeline_is_off():
    """The model is as it would be without."""

    def case():
        model = Net()
        optimizer = bf.DistributedOptimizer(sgd(model), model, "adapt_then_combine")
        assert optimizer._training_tracer.enabled is None
        return [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]

    with bf.local_world(1) as world:
        assert set(world.run(case)[0]) == {0}


def test_copies_of_a_model_are_not_listened_to(tmp_path):
    """Its hooks do nothing there, as those of the optimizers."""

    def case():
        model = Net()
        bf.DistributedOptimizer(sgd(model), model)
        copy.deepcopy(model)(torch.ones(1, 4)).sum().backward()

    (events,) = trained(tmp_path, case)
    assert not spans(events, "forward")


def test_of_two_wrappers_the_first_ones_steps_are_noted(tmp_path):
    """Steps of two would overlap; passes and updates of both are there."""

    def case():
        one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        optimizers = [bf.DistributedOptimizer(sgd(model), model) for model in (one, two)]
        for _ in range(3):
            two(one(torch.ones(1, 1))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    (events,) = trained(tmp_path, case)
    assert_nested(events)
    assert len(spans(events, "step")) == 3
    assert len(spans(events, "optimizer")) == 6


def test_what_torch_compiles_is_left_alone(monkeypatch):
    """Its modules are none any more: hooks of theirs would only have it compiled again."""
    model = torch.nn.Linear(1, 1)
    training = TrainingTracer(Tracer(0, None), [model])
    training.steps = 2
    assert training._traces_modules
    monkeypatch.setattr(recorded, "has_compiled", lambda: True)
    assert not training._traces_modules
    assert recorded_passes.has_compiled() in (True, False)


def test_the_cost_of_a_module_is_known():
    """Some microseconds: far below a millisecond, and not less than nothing on a busy machine."""
    assert 0 <= recorded_passes.module_tracing_cost() < 1e6
