"""Report of a run: Markdown tables on the console with their aims, a JSON file, and progress."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.tables import FigureRow, FigureTable, TimingRow, TimingTable, size_text, time_text
from benchmarks.targets import TargetResult, check_figure_targets, check_table_targets, short

GPU_TRANSPORTS = ("cuda_ipc", "cuda_staged", "mpi_cuda", "nccl")


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command line.

    Attributes:
        quick: Little of everything, to see that it runs.
        rounds: How often each thing is measured; None for the bench's own choice.
        pretend: Whether the host stands in for a GPU.
        transports: Of ``gpu``: these alone; none for all.
        with_torchft: Of ``elastic`` and ``sharded``: whether torchft is installed and measured.
    """

    quick: bool
    rounds: int | None
    pretend: bool = False
    transports: tuple[str, ...] = ()
    with_torchft: bool = False


@dataclass(frozen=True)
class BenchFigures:
    """Results of a benchmark that starts its own ranks.

    Attributes:
        facts: The report's header.
        tables: What is shown, in order.
        draw: Draws a plot into a file.
        rows: Rounds of what was timed, for JSON.
        missing: What could not be measured, in sentences.
        failures: What cannot be right, in sentences: the bench ends with 1 after its report.
    """

    facts: Mapping[str, Any]
    tables: Sequence[FigureTable]
    draw: Callable[[Path], None]
    rows: Sequence[TimingRow] = ()
    missing: Sequence[str] = ()
    failures: Sequence[str] = ()


Line = tuple[list[str], list[TargetResult]]
"""Cells of a line, and the aims that stand beside them."""


@contextmanager
def progress_line(title: str, total: int | None, *, shows: bool) -> Iterator[Callable[[str], None]]:
    """Show on stderr how far a measurement is; it is redrawn between measurements only.

    Args:
        title: What is measured.
        total: How many steps it takes; None where nobody knows.
        shows: Whether this rank shows anything.

    Yields:
        To be called with a text after each step.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=not shows)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title, total=total)
        progress.refresh()

        def advance(text: str) -> None:
            progress.update(task, advance=1, description=f"{title}, {text}")
            progress.refresh()

        yield advance


def timing_lines(table: TimingTable, rows: Sequence[TimingRow]) -> tuple[list[str], list[Line]]:
    """Return columns and lines of a table of timings: a line for each size, or for each step."""
    lines = _step_lines if table.samples is not None else _size_lines
    return lines(table, rows, check_table_targets(table, rows))


def _told(row: TimingRow | None) -> str:
    return "" if row is None else f"{time_text(row.median)} ±{row.spread:.0%}"


def _size_lines(
    table: TimingTable, rows: Sequence[TimingRow], results: Sequence[TargetResult]
) -> tuple[list[str], list[Line]]:
    """A line for each size, a column for each rival, and the ratio of two of them."""
    found = {(row.rival, row.nbytes): row for row in rows}
    names = [one.name for one in table.rivals if any(row.rival == one.name for row in rows)]
    compare = table.compare
    if compare is None:
        compare = tuple(rival.name for rival in table.rivals[:2])
    compared = len(compare) == 2 and set(compare) <= set(names)
    columns = [table.size_is, *names, *([" ÷ ".join(map(short, compare))] if compared else [])]
    lines: list[Line] = []
    for nbytes in sorted({row.nbytes for row in rows}):
        cells = [size_text(nbytes), *(_told(found.get((name, nbytes))) for name in names)]
        if compared:
            first, second = (found.get((name, nbytes)) for name in compare)
            cells.append(f"{first.median / second.median:.2f}" if first and second else "")
        lines.append((cells, [one for one in results if one.nbytes == nbytes]))
    return columns, lines


def _step_lines(
    table: TimingTable, rows: Sequence[TimingRow], results: Sequence[TargetResult]
) -> tuple[list[str], list[Line]]:
    """A line for each rival: a step's time, samples per second, and what it adds to the first."""
    first = table.rivals[0].name
    base = next((row.median for row in rows if row.rival == first), None)
    lines: list[Line] = []
    for row in rows:
        over = ""
        if base is not None and row.rival != first:
            over = f"{time_text(row.median - base)}, {row.median / base - 1:.0%}"
        cells = [row.rival, _told(row), f"{(table.samples or 0) / row.median:.4g}", over]
        lines.append((cells, [one for one in results if one.rival == row.rival]))
    return ["method", "a step", "samples/s, all ranks", f"over the {first}"], lines


def as_figures(table: TimingTable, rows: Sequence[TimingRow]) -> FigureTable:
    """Return a table's medians and spreads as figures, which JSON carries between processes."""
    columns, found = timing_lines(table, rows)
    lines = []
    for cells, results in found:
        words, met = None, None
        for one in results:
            told = f" ({one.found})" if one.met is False and one.found else ""
            words, met = one.words + told, one.met
        lines.append(FigureRow(tuple(cells), words, met))
    return FigureTable(table.key, table.title, columns, lines, table.note)


@dataclass
class Report:
    """Report that shows tables as they come, and keeps them for a JSON file.

    Args:
        facts: Machine and versions, shown at once.
        quiet: Whether nothing is shown, as on all ranks but the first.
        file: Where to; None for the standard output.
    """

    facts: Mapping[str, Any]
    quiet: bool = False
    file: IO[str] | None = None
    rows: list[TimingRow] = field(default_factory=list)
    tables: list[FigureTable] = field(default_factory=list)
    results: list[TargetResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        # as wide as the tables need: a folded line is no Markdown
        self._console = Console(
            width=1000,
            quiet=self.quiet,
            color_system=None,
            highlight=False,
            soft_wrap=True,
            file=self.file,
        )
        self.say(*(f"{key.replace('_', ' '):>16}  {value}" for key, value in self.facts.items()))
        self.say("")

    def say(self, *sentences: str) -> None:
        """Print each on a line of its own."""
        for sentence in sentences:
            self._console.print(sentence, markup=False)

    def add_timings(
        self, table: TimingTable, rows: Sequence[TimingRow], missing: Mapping[str, str]
    ) -> None:
        """Show median and spread of every rival, a ratio, the aims, and who could not run."""
        self.rows += rows
        columns, lines = timing_lines(table, rows)
        self._show(table, columns, lines)
        self.say(*(f"{name} was not measured: {reason}" for name, reason in missing.items()), "")
        self.results += check_table_targets(table, rows)

    def add_figures(self, table: FigureTable) -> None:
        """Show a table of figures with its aims."""
        self.tables.append(table)
        results = check_figure_targets(table)
        judged = iter(results)
        lines = [
            (
                [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in line.cells],
                [] if line.aim is None else [next(judged)],
            )
            for line in table.lines
        ]
        self._show(table, list(table.columns), lines)
        self.say("")
        self.results += results

    def _show(
        self, table: TimingTable | FigureTable, columns: list[str], lines: Sequence[Line]
    ) -> None:
        """Print a table in Markdown's form, all cells at the right but for the aims."""
        self.say(table.title, "", *([textwrap.fill(table.note, 100), ""] if table.note else []))
        if not lines and isinstance(table, TimingTable):
            return
        marked = [[*cells, "; ".join(one.text for one in aims)] for cells, aims in lines]
        widths = [max(map(len, cells)) for cells in zip([*columns, "aim"], *marked, strict=True)]
        rule = [*("-" * (width - 1) + ":" for width in widths[:-1]), "-" * widths[-1]]
        shown = len(columns) + any(aims for _, aims in lines)
        for cells in ([*columns, "aim"], rule, *marked):
            padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            padded[-1] = cells[-1].ljust(widths[-1])
            self.say(f"| {' | '.join(padded[:shown])} |")

    def end(self, json_file: Path | None) -> None:
        """Name every aim that is missed or could not be judged, and write the JSON file."""
        results = self.results
        met = sum(one.met is True for one in results)
        if results and met == len(results):
            self.say(f"All {met} aims are met.")
        elif results:
            self.say(f"{met} of {len(results)} aims are met.")
            for wanted in (False, None):
                self.say(*(f"  {one.place}: {one.text}" for one in results if one.met is wanted))
        if json_file is not None and not self.quiet:
            text = json.dumps(self._found(), indent=1, ensure_ascii=False)
            json_file.write_text(text + "\n", encoding="utf-8")

    def _found(self) -> dict[str, Any]:
        """Return the header, every row with its rounds in seconds, figures and aims."""
        rows = [
            {
                "table": row.table,
                "rival": row.rival,
                "bytes": row.nbytes,
                "median": row.median,
                "quartiles": row.quartiles,
                "calls_per_round": row.calls,
                "rounds": row.seconds,
            }
            for row in self.rows
        ]
        sheets = [
            {
                "table": table.key,
                "title": table.title,
                "columns": list(table.columns),
                "lines": [asdict(line) for line in table.lines],
            }
            for table in self.tables
        ]
        aims = [asdict(one) for one in self.results]
        return {"header": dict(self.facts), "results": rows, "sheets": sheets, "aims": aims}
