"""Program that ``memory`` starts on every rank: training steps by one method."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import torch

import asyncddp as bf
from benchmarks import baselines
from benchmarks.memory.memory_table import RankMemory
from benchmarks.memory.process_memory import MemoryUnknownError, Steps, in_shared_memory, peak_of
from benchmarks.memory.training_methods import METHODS, OVER_GLOO, TrainingRun
from benchmarks.run_header import facts_of_run
from benchmarks.tables import RankGroup

__all__ = ["main"]

_TINY = (2, 64, 2)  # layers, width, steps


def _measured(world: RankGroup, method: str, layers: int, width: int, steps: int) -> RankMemory:
    """Measure one method on this rank; its libraries are loaded by steps on a tiny net before."""
    if world.gloo is not None and method in OVER_GLOO:
        return RankMemory(why=world.gloo)
    wrap, model = METHODS[method], layers * width**2 * 4
    TrainingRun(*_TINY[:2], wrap).go(_TINY[2])
    made: list[TrainingRun] = []

    def make() -> Steps:
        made.append(TrainingRun(layers, width, wrap))
        return made[0].go

    peak = peak_of(make, steps, bf.barrier)
    shared = in_shared_memory(next(made[0].net.parameters()))
    return RankMemory(model, peak - 3 * model, shared)


@click.command()
@click.option("--method", type=click.Choice(list(METHODS)), required=True)
@click.option("--layers", type=int, required=True)
@click.option("--width", type=int, required=True)
@click.option("--steps", type=click.IntRange(min=2), required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(method: str, layers: int, width: int, steps: int, out: Path) -> None:
    """Measure on this run's ranks; rank 0 writes what all have found."""
    bf.init()
    world = baselines.join()
    try:
        found = _measured(world, method, layers, width, steps)
    except MemoryUnknownError as reason:
        found = RankMemory(why=str(reason))
    ranks, facts = bf.allgather_object(asdict(found)), facts_of_run()
    if bf.rank() == 0:
        out.write_text(json.dumps({"ranks": ranks, "header": facts}), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
