"""Program that ``scale`` starts on every rank, where ranks are processes."""

from __future__ import annotations

import json
from pathlib import Path

import click

import asyncddp as bf
from benchmarks.run_header import facts_of_run
from benchmarks.scale.message_counters import CounterUnavailableError, OpenMpiCounter
from benchmarks.scale.verb_counts import count_verbs

__all__ = ["main"]


@click.command()
@click.option("--nbytes", type=int, required=True)
@click.option("--calls", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(nbytes: int, calls: int, out: Path) -> None:
    """Count on this run's ranks; rank 0 writes what all have found."""
    bf.init(transport="mpi")  # as between machines, which share no memory
    try:
        inside, why = OpenMpiCounter(), ""
    except CounterUnavailableError as reason:
        inside, why = None, str(reason)
    ranks = bf.allgather_object(count_verbs(nbytes, calls, inside))
    facts = facts_of_run()
    if bf.rank() == 0:
        found = {"ranks": ranks, "why": why, "header": facts}
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
