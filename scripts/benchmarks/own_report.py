"""The command line and the report of a bench that starts its own ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.contract import Line, Row, Sheet
from benchmarks.own_runs import RunFailed
from benchmarks.progress import progress_line
from benchmarks.report import make_console, save_json, show_header, show_sheet, show_summary

__all__ = ["Figures", "Options", "command", "finished"]


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        quick: Little of everything, to see that it runs.
        rounds: How often each thing is measured; None for the bench's own choice.
    """

    quick: bool
    rounds: int | None


@dataclass(frozen=True)
class Figures:
    """What a bench has found.

    Attributes:
        facts: The report's header.
        sheets: What is shown, in order.
        draw: Draws a plot into a file.
        rows: Rounds of what was timed, for JSON.
        missing: What could not be measured, in sentences.
    """

    facts: Mapping[str, Any]
    sheets: Sequence[tuple[Sheet, Sequence[Line]]]
    draw: Callable[[Path], None]
    rows: Sequence[Row] = ()
    missing: Sequence[str] = field(default=())


def finished(
    key: str, title: str, columns: Sequence[str], lines: Sequence[Line], note: str = ""
) -> tuple[Sheet, Sequence[Line]]:
    """A sheet whose lines are there already."""
    return Sheet(key, title, columns, lambda world, advance: list(lines), note), lines


def command(
    name: str, measure: Callable[[Options, Callable[[str], None]], Figures]
) -> click.Command:
    """Make the command line of a bench.

    Args:
        name: The bench's.
        measure: Measures all; told where to say how far it is. :class:`RunFailed` is told to the
            user, and ends the command with 1.
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
                figures = measure(Options(quick, rounds), advance)
        except RunFailed as problem:
            raise click.ClickException(str(problem)) from problem
        _report(figures, json_file)
        if plot_file is not None:
            figures.draw(plot_file)

    return main


def _terminated(number: int, frame: FrameType | None) -> None:
    """Leave by way of every ``finally``, so that runs and hosts are taken down."""
    sys.exit(128 + number)


def _report(figures: Figures, json_file: Path | None) -> None:
    console = make_console()
    show_header(console, figures.facts)
    console.print()
    verdicts = [
        verdict for sheet, lines in figures.sheets for verdict in show_sheet(console, sheet, lines)
    ]
    for sentence in figures.missing:
        console.print(sentence, markup=False)
    show_summary(console, verdicts)
    if json_file is not None:
        save_json(json_file, figures.facts, figures.rows, figures.sheets, verdicts)
