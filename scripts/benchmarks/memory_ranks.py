"""What ``memory`` runs on every rank of a fresh pair: training steps of one method."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import click
import torch

import asyncddp as bf
import topology
from benchmarks import raw
from benchmarks.contract import World
from benchmarks.memory_gauge import (
    MemoryNotTold,
    in_shared_memory,
    own_bytes,
    own_peak,
    reset_peak,
)
from benchmarks.own_facts import facts_of_run

__all__ = ["AIMED", "METHODS", "Found", "peak_of"]

_BATCH = 4
_TINY = (2, 64, 2)  # layers, width, steps
_Module: TypeAlias = torch.nn.Module
_Optimizer: TypeAlias = torch.optim.Optimizer
Wrap = Callable[[_Module, _Optimizer], tuple[_Module, _Optimizer]]
Steps = Callable[[int], object]


@dataclass(frozen=True)
class Found:
    """What one rank has found.

    Attributes:
        model: Bytes of the model.
        beyond: Bytes at the peak beyond model, gradients and the optimizer's state.
        shared: Whether the parameters lie in shared memory.
        why: Why nothing could be measured, if so.
    """

    model: int = 0
    beyond: int = 0
    shared: bool = False
    why: str = ""


def peak_of(make: Callable[[], Steps], steps: int, meet: Callable[[], object]) -> int:
    """The most that this process held in some steps, beyond what it held before.

    Args:
        make: Makes all that is needed, and gives what makes so many steps.
        steps: How many; half of them are taken apart, when everything has been made.
        meet: Waits for the other ranks, so that none is in the middle of a step.
    """
    meet()
    before = own_bytes()
    reset_peak()
    go = make()
    peaks = []
    for part in (steps - steps // 2, steps // 2):
        go(part)
        meet()
        peaks.append(own_peak())
        reset_peak()
    return max(peaks) - before


class _Training:
    """A net of square linear layers under SGD with momentum, whose state is one more model."""

    def __init__(self, layers: int, width: int, wrap: Wrap) -> None:
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
        sgd = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self._model, self._optimizer = wrap(self.net, sgd)
        self._batch = torch.randn(_BATCH, width)

    def go(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = self._model(self._batch).square().mean()
            loss.backward()
            self._optimizer.step()


def _ours(algorithm: str, *, in_backward: bool = False) -> Wrap:
    def wrap(net: _Module, sgd: _Optimizer) -> tuple[_Module, _Optimizer]:
        schedule = topology.one_peer_exponential(bf.size())
        return net, bf.DistributedOptimizer(
            sgd,
            net,
            algorithm,
            topology=None if algorithm == "gradient_allreduce" else schedule,
            update_in_backward=in_backward,
        )

    return wrap


def _ddp(*, views: bool = False) -> Wrap:
    def wrap(net: _Module, sgd: _Optimizer) -> tuple[_Module, _Optimizer]:
        ddp = torch.nn.parallel.DistributedDataParallel
        return ddp(net, gradient_as_bucket_view=views), sgd

    return wrap


METHODS: dict[str, Wrap] = {
    "local step": lambda net, sgd: (net, sgd),
    "one-peer AWC": _ours("adapt_with_combine"),
    "one-peer ATC": _ours("adapt_then_combine"),
    "one-peer ATC in backward": _ours("adapt_then_combine", in_backward=True),
    "gradient_allreduce": _ours("gradient_allreduce"),
    "DDP gloo": _ddp(),
    "DDP gloo, gradient_as_bucket_view": _ddp(views=True),
}
_OVER_GLOO = ("DDP gloo", "DDP gloo, gradient_as_bucket_view")
AIMED = ("one-peer AWC", "one-peer ATC", "one-peer ATC in backward")


def _measured(world: World, method: str, layers: int, width: int, steps: int) -> Found:
    """Measure one method on this rank; its libraries are loaded by steps on a tiny net before."""
    if world.gloo is not None and method in _OVER_GLOO:
        return Found(why=world.gloo)
    wrap, model = METHODS[method], layers * width**2 * 4
    _Training(*_TINY[:2], wrap).go(_TINY[2])
    made: list[_Training] = []

    def make() -> Steps:
        made.append(_Training(layers, width, wrap))
        return made[0].go

    peak = peak_of(make, steps, bf.barrier)
    shared = in_shared_memory(next(made[0].net.parameters()))
    return Found(model, peak - 3 * model, shared)


@click.command()
@click.option("--method", type=click.Choice(list(METHODS)), required=True)
@click.option("--layers", type=int, required=True)
@click.option("--width", type=int, required=True)
@click.option("--steps", type=click.IntRange(min=2), required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(method: str, layers: int, width: int, steps: int, out: Path) -> None:
    """Measure on this run's ranks; rank 0 writes what all have found."""
    bf.init()
    world = raw.join()
    try:
        found = _measured(world, method, layers, width, steps)
    except MemoryNotTold as reason:
        found = Found(why=str(reason))
    ranks, facts = bf.allgather_object(asdict(found)), facts_of_run()
    if bf.rank() == 0:
        out.write_text(json.dumps({"ranks": ranks, "header": facts}), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
