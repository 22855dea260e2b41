"""``timeline``: the cost of tracing in a training step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.config import Config
from asyncddp.context.context import Context, use
from asyncddp.transport.selection import open_transport
from benchmarks.tables import Call, RankGroup, Rival, Target, TimingTable
from benchmarks.training_models import Workload, benched_models
from benchmarks.training_step import make_training, ours

_OFF, _ON = "off", "on"
_AIM = Target(
    _ON, 1.03, _OFF, words="≤ 3 % of the step", told=lambda ratio: f"{100 * (ratio - 1):.2g} %"
)
_SMALL = 4  # bytes


@dataclass
class _TracedAndPlainWorlds:
    """Two contexts of the same processes: the current one, and one with tracing.

    Args:
        world: The ranks.
    """

    world: RankGroup
    recorded: Context | None = None
    folders: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Make the second one; on all ranks."""
        folder = tempfile.mkdtemp(prefix="asyncddp-bench-") if self.world.rank == 0 else None
        self.folders.append(self.world.comm.bcast(folder))
        config = Config.from_environment(timeline=f"{self.folders[-1]}/")
        self.recorded = Context(open_transport(config.transport), config)

    def close(self) -> None:
        """Leave it, and remove what it wrote; on all ranks."""
        if self.recorded is not None:
            self.world.comm.Barrier()
            self.recorded.close("it was measured")
            self.recorded = None
            self.world.comm.Barrier()
        if self.world.rank == 0:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)
        self.folders.clear()

    def inside(self, name: str) -> Any:
        """A context manager in which verbs are those of a rival's world."""
        return use(self.recorded) if name == _ON and self.recorded is not None else nullcontext()


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench: steps of two models, and the smallest of averages."""
    worlds = _TracedAndPlainWorlds(world)
    graph = topology.one_peer_exponential(world.size)

    def on_and_off(prepare: Callable[[str, Any, int], Call], given: Any) -> dict[str, Any]:
        rivals = [Rival(name, partial(prepare, name, given)) for name in (_OFF, _ON)]
        both = {"compare": (_ON, _OFF), "begin": worlds.open, "end": worlds.close}
        return {"rivals": rivals, **both}

    def step(name: str, workload: Workload, nbytes: int) -> Call:
        with worlds.inside(name):
            made = make_training(world, workload)
            ours(made, "adapt_with_combine", graph)
        return made.step

    def small(name: str, given: None, nbytes: int) -> Call:
        x = torch.ones(nbytes // 4)

        def average(number: int) -> torch.Tensor:
            with worlds.inside(name):
                return bf.neighbor_allreduce(x, name="small")

        return average

    steps = [
        TimingTable(
            f"timeline_{one.key}",
            f"a step of {one.title}, adapt_with_combine, one-peer",
            [one.nbytes],
            size_is="model",
            targets=[_AIM],
            lead=1,
            note="Off and on take turns in the same processes.",
            **on_and_off(step, one),
        )
        for one in benched_models(quick=quick)[:2]
    ]
    note = "Noted of each call: its length, and what was waited for, sent, read and mixed."
    title = "an average of the smallest tensor"
    average = TimingTable("timeline_small", title, [_SMALL], note=note, **on_and_off(small, None))
    return [*steps, average]
