"""What ``memory`` starts on every rank of a fresh pair: training steps of one method."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import torch

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import World
from benchmarks.memory_gauge import MemoryNotTold, Steps, in_shared_memory, peak_of
from benchmarks.memory_methods import METHODS, OVER_GLOO, Training
from benchmarks.memory_tables import Found
from benchmarks.own_facts import facts_of_run

__all__ = ["main"]

_TINY = (2, 64, 2)  # layers, width, steps


def _measured(world: World, method: str, layers: int, width: int, steps: int) -> Found:
    """Measure one method on this rank; its libraries are loaded by steps on a tiny net before."""
    if world.gloo is not None and method in OVER_GLOO:
        return Found(why=world.gloo)
    wrap, model = METHODS[method], layers * width**2 * 4
    Training(*_TINY[:2], wrap).go(_TINY[2])
    made: list[Training] = []

    def make() -> Steps:
        made.append(Training(layers, width, wrap))
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
