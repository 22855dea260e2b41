"""Command line and report of a benchmark that starts its own ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.console_report import (
    make_console,
    save_json,
    show_figure_table,
    show_header,
    show_summary,
)
from benchmarks.progress_line import progress_line
from benchmarks.subprocess_runs import RunFailedError
from benchmarks.tables import FigureRow, FigureTable, TimingRow

__all__ = ["BenchFigures", "BenchOptions", "command", "finished"]


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command line.

    Attributes:
        quick: Little of everything, to see that it runs.
        rounds: How often each thing is measured; None for the bench's own choice.
    """

    quick: bool
    rounds: int | None


@dataclass(frozen=True)
class BenchFigures:
    """Results of a benchmark.

    Attributes:
        facts: The report's header.
        sheets: What is shown, in order.
        draw: Draws a plot into a file.
        rows: Rounds of what was timed, for JSON.
        missing: What could not be measured, in sentences.
        failures: What cannot be right, in sentences: the bench ends with 1 after its report.
    """

    facts: Mapping[str, Any]
    figure_tables: Sequence[tuple[FigureTable, Sequence[FigureRow]]]
    draw: Callable[[Path], None]
    rows: Sequence[TimingRow] = ()
    missing: Sequence[str] = field(default=())
    failures: Sequence[str] = field(default=())


def finished(
    key: str, title: str, columns: Sequence[str], lines: Sequence[FigureRow], note: str = ""
) -> tuple[FigureTable, Sequence[FigureRow]]:
    """A sheet whose lines are there already."""
    return FigureTable(key, title, columns, lambda world, advance: list(lines), note), lines


def command(
    name: str, measure: Callable[[BenchOptions, Callable[[str], None]], BenchFigures]
) -> click.Command:
    """Make the command line of a bench.

    Args:
        name: The bench's.
        measure: Measures everything, given a progress callback. A :class:`RunFailedError` is shown
            to the user and ends the command with 1.
    """

    @click.command(name, context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
    @click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False))
    @click.option("--quick", is_flag=True, help="Little of everything: seconds.")
    @click.option("--rounds", type=click.IntRange(min=2), default=None)
    def main(
        json_file: Path | None, plot_file: Path | None, quick: bool, rounds: int | None
    ) -> None:
        signal.signal(signal.SIGTERM, _terminated)
        try:
            with progress_line(name, None, shows=True) as advance:
                figures = measure(BenchOptions(quick, rounds), advance)
        except RunFailedError as problem:
            raise click.ClickException(str(problem)) from problem
        _report(figures, json_file)
        if plot_file is not None:
            figures.draw(plot_file)
        if figures.failures:
            raise click.ClickException("\n".join(figures.failures))

    return main


def _terminated(number: int, frame: FrameType | None) -> None:
    """Leave by way of every ``finally``, so that runs and hosts are taken down."""
    sys.exit(128 + number)


def _report(figures: BenchFigures, json_file: Path | None) -> None:
    console = make_console()
    show_header(console, figures.facts)
    console.print()
    target_results = [
        target_result
        for figure_table, lines in figures.figure_tables
        for target_result in show_figure_table(console, figure_table, lines)
    ]
    for sentence in figures.missing:
        console.print(sentence, markup=False)
    show_summary(console, target_results)
    if json_file is not None:
        save_json(json_file, figures.facts, figures.rows, figures.figure_tables, target_results)
