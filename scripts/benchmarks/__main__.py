"""What ``scripts/bench`` starts on every rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import Row, Table, World
from benchmarks.harness import measure
from benchmarks.machine import header
from benchmarks.plot import save_plot
from benchmarks.report import save_json, show_header, show_table, size_text


class Bench(Protocol):
    """A bench is a module of this folder with this function."""

    def tables(self, world: World, *, quick: bool) -> list[Table]:
        """What it measures."""
        ...


@click.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--quick", is_flag=True)
@click.option("--rounds", type=click.IntRange(min=2), default=None)
def main(
    names: tuple[str, ...],
    json_file: Path | None,
    plot_file: Path | None,
    quick: bool,
    rounds: int | None,
) -> None:
    """Measure the named benches, modules of this folder; rank 0 reports."""
    bf.init()
    world = raw.join()
    facts = header(world)
    rounds = rounds or (5 if quick else 30)
    facts["rounds"] = rounds
    shows = world.rank == 0
    console = Console(width=150, quiet=not shows, color_system=None, highlight=False)
    show_header(console, facts)
    console.print()
    benches = [cast("Bench", importlib.import_module(f"benchmarks.{name}")) for name in names]
    tables = [table for bench in benches for table in bench.tables(world, quick=quick)]
    rows: list[Row] = []
    for table in tables:
        found, missing = _measured(world, table, rounds, 0.001 if quick else 0.005, shows)
        rows += found
        show_table(console, table, found, missing)
    if shows and json_file is not None:
        save_json(json_file, facts, rows)
    if shows and plot_file is not None:
        save_plot(plot_file, tables, rows, f"{facts['processor']}, {world.size} ranks")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _measured(
    world: World, table: Table, rounds: int, sample: float, shows: bool
) -> tuple[list[Row], dict[str, str]]:
    """Measure a table behind a progress line that is redrawn between sizes only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=not shows)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(table.title, total=len(table.sizes))
        progress.refresh()

        def advance(nbytes: int) -> None:
            progress.update(task, advance=1, description=f"{table.title}, {size_text(nbytes)} done")
            progress.refresh()

        return measure(world, table, rounds=rounds, sample=sample, advance=advance)


if __name__ == "__main__":
    main(prog_name="scripts/bench")
