"""Program on every rank of ``scale``'s runs with more ranks than cores: MPI first, then ours."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import mpi4py
import torch

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # started on the clock, ended at exit
from mpi4py import MPI  # noqa: E402

import asyncddp as bf  # noqa: E402

__all__ = ["main"]

_SAMPLE = 0.1  # seconds of a rival's turn


def _wait_for_all(folder: Path, ranks: int) -> None:
    """Wait until all ranks have loaded torch and mpi4py, which is not compared."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.02)


def _start() -> list[float]:
    """Seconds until all ranks have started MPI and met, loaded asyncddp, and started it."""
    moments = [time.monotonic()]
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    MPI.COMM_WORLD.Barrier()
    moments.append(time.monotonic())
    init = bf.init  # loaded on first use
    moments.append(time.monotonic())
    init()
    moments.append(time.monotonic())
    begun, *ended = zip(*MPI.COMM_WORLD.allgather(moments), strict=True)
    ends = [min(begun), *map(max, ended)]
    return [end - before for before, end in pairwise(ends)]


def _measure(rounds: int) -> dict[str, Any]:
    """Let rivals take turns, with modules that load asyncddp."""
    from benchmarks.harness import measure
    from benchmarks.run_header import facts_of_run
    from benchmarks.scale.oversubscribed_tables import oversubscribed_tables
    from benchmarks.tables import RankGroup

    world = RankGroup(MPI.COMM_WORLD.Dup(), "not compared here")
    rows = [
        (row.table, row.rival, row.seconds)
        for table in oversubscribed_tables(world)
        for row in measure(world, table, rounds=rounds, sample=_SAMPLE, advance=lambda _: None)[0]
    ]
    return {"rows": rows, "header": facts_of_run()}


@click.command()
@click.option("--ranks", type=int, required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(ranks: int, rounds: int, out: Path) -> None:
    """Measure on this run's ranks; rank 0 writes what was found."""
    torch.set_num_threads(1)
    _wait_for_all(out.with_name("loaded"), ranks)
    found = {"start": _start(), **_measure(rounds)}
    if MPI.COMM_WORLD.rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
