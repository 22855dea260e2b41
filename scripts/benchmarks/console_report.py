"""Benchmark results as Markdown tables on the console, with the targets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.json_results import save_json
from benchmarks.tables import FigureRow, FigureTable, TimingRow, TimingTable
from benchmarks.targets import TargetResult, check_figure_targets, check_table_targets, short
from benchmarks.unit_text import size_text, time_text

__all__ = [
    "make_console",
    "save_json",
    "show_figure_table",
    "show_header",
    "show_summary",
    "show_table",
    "size_text",
    "time_text",
]


def make_console(*, quiet: bool = False) -> Console:
    """A console whose lines are as long as the tables need: a folded one is no Markdown."""
    return Console(width=1000, quiet=quiet, color_system=None, highlight=False, soft_wrap=True)


def show_header(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what was measured where."""
    for key, value in facts.items():
        console.print(f"{key.replace('_', ' '):>16}  {value}", markup=False)


def show_table(
    console: Console, table: TimingTable, rows: Sequence[TimingRow], missing: Mapping[str, str]
) -> list[TargetResult]:
    """Print median and spread of every rival, a ratio, and the aims; return the target results."""
    target_results = check_table_targets(table, rows)
    _show_title(console, table.title, table.note)
    if rows:
        lines = _steps if table.samples is not None else _sizes
        _show_lines(console, *lines(table, rows, target_results))
    for name, reason in missing.items():
        console.print(f"{name} was not measured: {reason}", markup=False)
    console.print()
    return target_results


def show_figure_table(
    console: Console, figure_table: FigureTable, lines: Sequence[FigureRow]
) -> list[TargetResult]:
    """Print a sheet's lines with the aims; return the target results."""
    target_results = check_figure_targets(figure_table, lines)
    _show_title(console, figure_table.title, figure_table.note)
    columns = [*figure_table.columns, *(["aim"] if target_results else [])]
    judged = iter(target_results)
    shown = []
    for line in lines:
        cells = [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in line.cells]
        targets = [] if line.aim is None else [next(judged)]
        shown.append([*cells, *([_marks(targets)] if target_results else [])])
    _show_lines(console, columns, shown)
    console.print()
    return target_results


def show_summary(console: Console, target_results: Sequence[TargetResult]) -> None:
    """Print every aim that is missed, and every one that could not be judged."""
    if not target_results:
        return
    missed = [target_result for target_result in target_results if target_result.met is False]
    open_ones = [target_result for target_result in target_results if target_result.met is None]
    met = len(target_results) - len(missed) - len(open_ones)
    if met == len(target_results):
        console.print(f"All {met} aims are met.", markup=False)
        return
    console.print(f"{met} of {len(target_results)} aims are met.", markup=False)
    for target_result in [*missed, *open_ones]:
        console.print(f"  {target_result.place}: {target_result.text}", markup=False)


def _show_title(console: Console, title: str, note: str) -> None:
    console.print(f"{title}\n", markup=False)
    if note:
        console.print(f"{textwrap.fill(note, 100)}\n", markup=False)


def _show_lines(console: Console, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown's form, all cells at the right but for the aims."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]
    right = [column != "aim" for column in columns]
    rule = [
        f"{'-' * (width - 1)}{':' if at_right else '-'}"
        for width, at_right in zip(widths, right, strict=True)
    ]
    for cells in (columns, rule, *lines):
        padded = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(cells, widths, right, strict=True)
        ]
        console.print(f"| {' | '.join(padded)} |", markup=False)


def _marks(target_results: Iterable[TargetResult]) -> str:
    return "; ".join(target_result.text for target_result in target_results)


def _sizes(
    table: TimingTable, rows: Sequence[TimingRow], target_results: Sequence[TargetResult]
) -> tuple[list[str], list[list[str]]]:
    """A line for each size, a column for each rival."""
    found = {(row.rival, row.nbytes): row for row in rows}
    names = [one.name for one in table.rivals if any(row.rival == one.name for row in rows)]
    compare = table.compare
    if compare is None:
        compare = tuple(rival.name for rival in table.rivals[:2])
    compared = len(compare) == 2 and set(compare) <= set(names)
    columns = [table.size_is, *names]
    columns += [" ÷ ".join(map(short, compare))] if compared else []
    columns += ["aim"] if target_results else []
    lines = []
    for nbytes in sorted({row.nbytes for row in rows}):
        line = [size_text(nbytes), *(_median(found.get((name, nbytes))) for name in names)]
        if compared:
            first, second = (found.get((name, nbytes)) for name in compare)
            line.append(f"{first.median / second.median:.2f}" if first and second else "")
        if target_results:
            line.append(
                _marks(
                    target_result
                    for target_result in target_results
                    if target_result.nbytes == nbytes
                )
            )
        lines.append(line)
    return columns, lines


def _median(row: TimingRow | None) -> str:
    return "" if row is None else f"{time_text(row.median)} ±{row.spread:.0%}"


def _steps(
    table: TimingTable, rows: Sequence[TimingRow], target_results: Sequence[TargetResult]
) -> tuple[list[str], list[list[str]]]:
    """A line for each rival: a step's time, samples per second, and what it adds to the first."""
    first = table.rivals[0].name
    base = next((row.median for row in rows if row.rival == first), None)
    columns = ["method", "a step", "samples/s, all ranks", f"over the {first}"]
    columns += ["aim"] if target_results else []
    lines = []
    for row in rows:
        line = [
            row.rival,
            _median(row),
            f"{(table.samples or 0) / row.median:.4g}",
            "" if base is None or row.rival == first else _beyond(row.median, base),
        ]
        if target_results:
            line.append(
                _marks(
                    target_result
                    for target_result in target_results
                    if target_result.rival == row.rival
                )
            )
        lines.append(line)
    return columns, lines


def _beyond(seconds: float, base: float) -> str:
    return f"{time_text(seconds - base)}, {seconds / base - 1:.0%}"
