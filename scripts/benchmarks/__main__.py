"""Program that ``scripts/bench`` starts on every rank for the benchmarks that share a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import click
import torch
from rich.console import Console

import asyncddp as bf
from benchmarks import baselines
from benchmarks.console_report import (
    make_console,
    show_figure_table,
    show_header,
    show_summary,
    show_table,
)
from benchmarks.harness import measure
from benchmarks.json_results import save_json
from benchmarks.machine_info import header
from benchmarks.progress_line import progress_line
from benchmarks.table_plot import save_plot
from benchmarks.tables import FigureRow, FigureTable, RankGroup, TimingRow, TimingTable
from benchmarks.targets import TargetResult
from benchmarks.unit_text import size_text


class BenchModule(Protocol):
    """Interface of a benchmark module: its function ``tables``."""

    def tables(self, world: RankGroup, *, quick: bool) -> Sequence[TimingTable | FigureTable]:
        """Return the tables to measure."""
        ...


@dataclass
class BenchSession:
    """Run of some benchmarks: measures their tables and keeps the results.

    Args:
        world: The ranks.
        rounds: Rounds for each size of a table.
        sample: Seconds that one rival's turn should last at least.
    """

    world: RankGroup
    rounds: int
    sample: float
    tables: list[TimingTable] = field(default_factory=list)
    rows: list[TimingRow] = field(default_factory=list)
    figure_tables: list[tuple[FigureTable, list[FigureRow]]] = field(default_factory=list)
    target_results: list[TargetResult] = field(default_factory=list)

    @property
    def shows(self) -> bool:
        """True on the rank that reports."""
        return self.world.rank == 0

    def table(self, table: TimingTable, console: Console) -> None:
        """Measure and show a table."""
        with progress_line(table.title, len(table.sizes), shows=self.shows) as advance:
            rows, missing = measure(
                self.world,
                table,
                rounds=self.rounds,
                sample=self.sample,
                advance=lambda nbytes: advance(f"{size_text(nbytes)} done"),
            )
        self.tables.append(table)
        self.rows += rows
        self.target_results += show_table(console, table, rows, missing)

    def figure_table(self, figure_table: FigureTable, console: Console) -> None:
        """Let a sheet measure, and show it."""
        with progress_line(figure_table.title, None, shows=self.shows) as advance:
            lines = figure_table.measure(self.world, advance)
        self.figure_tables.append((figure_table, lines))
        self.target_results += show_figure_table(console, figure_table, lines)


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
    world = baselines.join()
    session = BenchSession(world, rounds or (5 if quick else 30), 0.0002 if quick else 0.005)
    facts = {**header(world), "rounds": session.rounds}
    if quick:
        facts["quick"] = "small sizes, few rounds: shows that it runs, and measures nothing"
    console = make_console(quiet=not session.shows)
    show_header(console, facts)
    console.print()
    for name in names:
        bench = cast("BenchModule", importlib.import_module(f"benchmarks.{name.replace('-', '_')}"))
        for one in bench.tables(world, quick=quick):
            if isinstance(one, TimingTable):
                session.table(one, console)
            else:
                session.figure_table(one, console)
    show_summary(console, session.target_results)
    if session.shows and json_file is not None:
        save_json(json_file, facts, session.rows, session.figure_tables, session.target_results)
    if session.shows and plot_file is not None and session.rows:
        caption = f"{facts['processor']}, {world.size} ranks"
        save_plot(plot_file, session.tables, session.rows, caption)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(prog_name="scripts/bench")
