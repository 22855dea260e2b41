"""Checkpoints of sharded replicas: saved on one layout, resumed on the same or on another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

import asyncddp as bf
from tests.sharded.training import ADAMW, Layout, Run, full, loss_of, spread
from tests.sharded.world import folder_of_all

BEFORE, AFTER = 3, 4
CASES: dict[str, Callable[[], Any]] = {}
LAYOUTS = {
    "2x2": Layout({"replica": 2, "shard": 2}),
    "even": Layout({"replica": 2, "shard": 2}, even=True),
    "tp": Layout({"replica": 2, "tp": 2}),
    "1x4": Layout({"replica": 1, "shard": 4}),
    "4x1": Layout({"replica": 4, "shard": 1}),
    "2x1": Layout({"replica": 2, "shard": 1}),
    "1x2": Layout({"replica": 1, "shard": 2}),
    "1x1": Layout({"replica": 1, "shard": 1}),
    "2x2x2": Layout({"replica": 2, "shard": 2, "tp": 2}),
    "2x4": Layout({"replica": 2, "shard": 4}),
}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


@cache
def run_of(layout: str) -> Run:
    return Run.of(LAYOUTS[layout])


class Training:
    """A model on a layout, its optimizer and a scheduler, which make steps with data by number."""

    def __init__(self, layout: str, *, make: Any = ADAMW, **arguments: Any) -> None:
        self.run = run_of(layout)
        self.model = self.run.sharded()
        self.mesh = self.run.replicas
        arguments = {"algorithm": "adapt_then_combine", "topology": "ring", **arguments}
        self.optimizer = bf.DistributedOptimizer(
            make(self.model.parameters()), self.model, mesh=self.mesh, **arguments
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def go(self, first: int, last: int) -> Training:
        batches = list(self.run.batches(whole=False, steps=last))
        for pair in batches[first:]:
            self.optimizer.zero_grad()
            loss_of(self.model, pair).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler

    def save(self, folder: Path, **options: Any) -> Path:
        return bf.save_checkpoint(folder, *self.parts, mesh=self.mesh, **options)

    def load(self, folder: Path, **options: Any) -> Any:
        return bf.load_checkpoint(folder, *self.parts, mesh=self.mesh, **options)

    def values(self) -> dict[str, torch.Tensor]:
        """Whole parameters and tensors of the optimizer's state; collective inside a replica."""
        found = dict(self.model.state_dict())
        for number, parameter in enumerate(self.model.parameters()):
            kept = self.optimizer.state[parameter]
            found |= {f"{number}.{key}": kept[key] for key in sorted(kept)}
        return {
            name: full(one).detach().clone()
            for name, one in found.items()
            if isinstance(one, torch.Tensor)
        }

    def save_values(self, file: Path) -> None:
        """Write the whole values of this rank's replica, for ranks of another world."""
        values = self.values()
        if self.is_first:
            torch.save(values, file)

    @property
    def is_first(self) -> bool:
        return all(
            self.run.mesh.get_local_rank(name) == 0 for name in list(self.run.layout.dims)[1:]
        )


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[float]:
    """The number of values that differ in a bit, and the largest difference."""
    assert one.keys() == other.keys()
    assert len(one) > 10
    bits = sum(not torch.equal(one[name], other[name]) for name in one)
    return [bits, max(float((one[name] - other[name]).abs().max()) for name in one)]


# the same layout


def resumes(layout: str, **arguments: Any) -> dict[str, Any]:
    """Save after some steps, load into a new run, go on; beside a run that was not interrupted."""
    folder = folder_of_all()
    first = Training(layout, **arguments).go(0, BEFORE)
    first.save(folder, extra={"of": bf.rank()}, replicas="all")
    second = Training(layout, **arguments)
    found = second.load(folder)
    loaded = differences(second.values(), first.values())
    first.go(BEFORE, BEFORE + AFTER)
    second.go(BEFORE, BEFORE + AFTER)
    rates = [one.scheduler.get_last_lr() for one in (first, second)]
    own = {"of": bf.rank()}
    return {
        "told": [found.exact, found.step == BEFORE, found.extra == own, rates[0] == rates[1]],
        "loaded": loaded,
        "further": differences(second.values(), first.values()),
        "apart": spread(first.run, first.model),
    }


@case
def what_fsdp_has_gathered() -> list[Any]:
    """Parameters that FSDP2 leaves gathered after an evaluation are saved and loaded by parts."""
    folder, first, second = folder_of_all(), Training("2x2").go(0, 1), Training("2x2")
    for one in (first, second):
        for part in (one.model.first, one.model.second, one.model):
            part.set_reshard_after_forward(False)
        one.model(torch.ones(2, 6, dtype=torch.float64))
        gathered = not any(isinstance(p, DTensor) for p in one.model.parameters())
        if one is first:
            first.save(folder, replicas="all")
    second.load(folder)
    return [gathered, *differences(second.values(), first.values())]


@case
def state_of_another_shape() -> list[Any]:
    """A DTensor of the optimizer that is not of its parameter's shape is whole on each rank."""
    folder, found = folder_of_all(), []
    first, second = Training("2x2").go(0, 1), Training("1x4")
    for one in first.model.parameters():
        mean = full(one).detach().mean(0, keepdim=True)
        whole = DTensor.from_local(mean, one.device_mesh, [Replicate()])
        first.optimizer.state[one]["mean"] = whole
    first.save(folder, replicas="rank0")
    second.load(folder)
    for parameter in second.model.parameters():
        mean = second.optimizer.state[parameter]["mean"]
        found.append(float((full(mean) - full(parameter).mean(0, keepdim=True)).abs().max()))
    return [len(found), max(found)]


DILOCO = {"algorithm": "diloco", "communication_interval": 2, "topology": None}
RESUMED: dict[str, Callable[[], Any]] = {
    "2x2: adapt_then_combine": partial(resumes, "2x2"),
    "2x2: diloco": partial(resumes, "2x2", **DILOCO),
    "2x2: choco_sgd": partial(resumes, "2x2", algorithm="choco_sgd", compression="sign"),
    "tp: gradient_tracking": partial(resumes, "tp", algorithm="gradient_tracking"),
}


# other layouts


def shared_folder() -> Path:
    """The folder of one test's worlds, which are of different numbers of ranks."""
    return Path(os.environ["STORE"]).parent.parent / "saved"


@case
def saved_for_others() -> float:
    """Save each replica's own and the average of two replicas of two parts; and go on."""
    folder = shared_folder()
    training = Training("2x2", **DILOCO).go(0, BEFORE)
    training.save(folder / "all", replicas="all")
    training.save_values(folder / f"own_{training.run.replica}.pt")
    apart = spread(training.run, training.model)
    training.go(BEFORE, BEFORE + AFTER)
    training.save_values(folder / f"later_{training.run.replica}.pt")
    again = Training("2x2", **DILOCO)
    again.load(folder / "all", replicas="average")
    again.go(BEFORE, BEFORE + AFTER)
    again.save_values(folder / f"from_average_{training.run.replica}.pt")
    bf.barrier()
    return apart


def arrives(layout: str, replicas: str | None = None) -> dict[str, Any]:
    """Load what two replicas of two parts have saved, and go on; beside runs of their layout."""
    folder = shared_folder()
    training = Training(layout, **DILOCO)
    own = training.run.layout.replicas == 2 and replicas is None
    found = training.load(folder / "all", replicas=replicas)
    if own:
        expected = torch.load(folder / f"own_{training.run.replica}.pt")
    else:
        both = [torch.load(folder / f"own_{number}.pt") for number in (0, 1)]
        expected = {name: (both[0][name] + both[1][name]) / 2 for name in both[0]}
    loaded = differences(training.values(), expected)
    training.go(BEFORE, BEFORE + AFTER)
    further = 0.0
    if training.run.layout.replicas == 2:
        name = "later" if own else "from_average"
        later = torch.load(folder / f"{name}_{training.run.replica}.pt")
        further = differences(training.values(), later)[1]
    told = [found.step == BEFORE, found.exact == (own and layout == "2x2")]
    return {"told": told, "loaded": loaded, "further": further, "own": own}


OTHERS = {
    4: {f"to {name}": partial(arrives, name) for name in ("1x4", "4x1", "tp")}
    | {"to the average": partial(arrives, "2x2", "average")},
    2: {f"to {name}": partial(arrives, name) for name in ("2x1", "1x2")},
    1: {"to 1x1": partial(arrives, "1x1")},
    8: {f"to {name}": partial(arrives, name) for name in ("2x4", "2x2x2")},
}
CASES.update(RESUMED)
for each in OTHERS.values():
    CASES.update(each)
EIGHT = {"2x2x2: diloco": partial(resumes, "2x2x2", **DILOCO), **OTHERS[8]}
CASES.update(EIGHT)
