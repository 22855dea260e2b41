"""What ``scripts/bench`` starts on every rank."""

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
from benchmarks import raw
from benchmarks.aims import Verdict
from benchmarks.contract import Line, Row, Sheet, Table, World
from benchmarks.harness import measure
from benchmarks.machine import header
from benchmarks.plot import save_plot
from benchmarks.progress import progress_line
from benchmarks.report import make_console, show_header, show_sheet, show_summary, show_table
from benchmarks.results import save_json
from benchmarks.units import size_text


class Bench(Protocol):
    """A bench is a module of this folder with this function."""

    def tables(self, world: World, *, quick: bool) -> Sequence[Table | Sheet]:
        """What it measures."""
        ...


@dataclass
class Session:
    """Measures what the benches ask for, and keeps what was found.

    Args:
        world: The ranks.
        rounds: Rounds for each size of a table.
        sample: Seconds that one rival's turn should last at least.
    """

    world: World
    rounds: int
    sample: float
    tables: list[Table] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sheets: list[tuple[Sheet, list[Line]]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def shows(self) -> bool:
        """Whether this rank reports."""
        return self.world.rank == 0

    def table(self, table: Table, console: Console) -> None:
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
        self.verdicts += show_table(console, table, rows, missing)

    def sheet(self, sheet: Sheet, console: Console) -> None:
        """Let a sheet measure, and show it."""
        with progress_line(sheet.title, None, shows=self.shows) as advance:
            lines = sheet.measure(self.world, advance)
        self.sheets.append((sheet, lines))
        self.verdicts += show_sheet(console, sheet, lines)


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
    session = Session(world, rounds or (5 if quick else 30), 0.001 if quick else 0.005)
    facts = {**header(world), "rounds": session.rounds}
    if quick:
        facts["quick"] = "small sizes, few rounds: shows that it runs, and measures nothing"
    console = make_console(quiet=not session.shows)
    show_header(console, facts)
    console.print()
    for name in names:
        bench = cast("Bench", importlib.import_module(f"benchmarks.{name}"))
        for one in bench.tables(world, quick=quick):
            if isinstance(one, Table):
                session.table(one, console)
            else:
                session.sheet(one, console)
    show_summary(console, session.verdicts)
    if session.shows and json_file is not None:
        save_json(json_file, facts, session.rows, session.sheets, session.verdicts)
    if session.shows and plot_file is not None and session.rows:
        caption = f"{facts['processor']}, {world.size} ranks"
        save_plot(plot_file, session.tables, session.rows, caption)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(prog_name="scripts/bench")
