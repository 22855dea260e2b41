"""Program on every rank of ``scale``'s runs with more ranks than cores: MPI first, then ours."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import click
import mpi4py
import torch

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # started on the clock, ended at exit
from mpi4py import MPI  # noqa: E402

import asyncddp as bf  # noqa: E402
from benchmarks.harness import measure  # noqa: E402
from benchmarks.run_header import facts_of_run  # noqa: E402
from benchmarks.scale.oversubscribed_tables import oversubscribed_tables  # noqa: E402
from benchmarks.tables import RankGroup  # noqa: E402

__all__ = ["main"]

_SAMPLE = 0.1  # seconds of a rival's turn


def _wait_for_all(folder: Path, ranks: int) -> None:
    """Wait until all ranks have loaded their libraries, which takes seconds and is not compared."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.02)


def _start(init: Callable[[], None]) -> tuple[float, float]:
    """Seconds in which all ranks start MPI and meet in a barrier, and then start asyncddp."""
    moments = [time.monotonic()]
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    MPI.COMM_WORLD.Barrier()
    moments.append(time.monotonic())
    init()
    moments.append(time.monotonic())
    every = MPI.COMM_WORLD.allgather(moments)
    begun, met, ended = zip(*every, strict=True)
    return max(met) - min(begun), max(ended) - max(met)


@click.command()
@click.option("--ranks", type=int, required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(ranks: int, rounds: int, out: Path) -> None:
    """Measure on this run's ranks; rank 0 writes what was found."""
    torch.set_num_threads(1)
    init = bf.init  # loads what it needs
    _wait_for_all(out.with_name("loaded"), ranks)
    started = _start(init)
    world = RankGroup(MPI.COMM_WORLD.Dup(), "not compared here")
    rows = [
        (row.table, row.rival, row.seconds)
        for table in oversubscribed_tables(world)
        for row in measure(world, table, rounds=rounds, sample=_SAMPLE, advance=lambda _: None)[0]
    ]
    facts = facts_of_run()
    if world.rank == 0:
        found = {"start": started, "rows": rows, "header": facts}
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
