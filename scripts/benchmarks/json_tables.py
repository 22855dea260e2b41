"""Conversion of timing tables to tables of figures that JSON can carry between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.standalone_command import finished
from benchmarks.tables import FigureRow, FigureTable, TimingRow, TimingTable
from benchmarks.targets import check_table_targets, short
from benchmarks.unit_text import size_text, time_text

__all__ = ["JsonTable", "to_json_table"]


@dataclass(frozen=True)
class JsonTable:
    """Table of figures with its rows, as plain data for JSON."""

    key: str
    title: str
    columns: Sequence[str]
    lines: Sequence[Mapping[str, Any]]
    note: str

    def opened(self) -> tuple[FigureTable, Sequence[FigureRow]]:
        """Return the table and its rows."""
        lines = [FigureRow(tuple(one["cells"]), one["aim"], one["met"]) for one in self.lines]
        return finished(self.key, self.title, self.columns, lines, self.note)


def to_json_table(table: TimingTable, rows: Sequence[TimingRow]) -> JsonTable:
    """Convert a table's timings to medians and spreads, a row for each size or method."""
    lines = _methods if table.samples is not None else _sizes
    columns, found = lines(table, rows)
    return JsonTable(table.key, table.title, columns, found, table.note)


def _cell(row: TimingRow | None) -> str:
    return "" if row is None else f"{time_text(row.median)} ±{row.spread:.0%}"


def _line(cells: Sequence[str], target_result: Any = None) -> dict[str, Any]:
    if target_result is None:
        return {"cells": list(cells), "aim": None, "met": None}
    told = f" ({target_result.found})" if target_result.met is False and target_result.found else ""
    return {"cells": list(cells), "aim": target_result.words + told, "met": target_result.met}


def _sizes(table: TimingTable, rows: Sequence[TimingRow]) -> tuple[list[str], list[dict[str, Any]]]:
    found = {(row.rival, row.nbytes): row for row in rows}
    names = [one.name for one in table.rivals if any(row.rival == one.name for row in rows)]
    compare = table.compare or ()
    compared = len(compare) == 2 and set(compare) <= set(names)
    columns = [table.size_is, *names]
    columns += [" ÷ ".join(map(short, compare))] if compared else []
    target_results = {
        target_result.nbytes: target_result for target_result in check_table_targets(table, rows)
    }
    lines = []
    for nbytes in sorted({row.nbytes for row in rows}):
        cells = [size_text(nbytes), *(_cell(found.get((name, nbytes))) for name in names)]
        if compared:
            first, second = (found.get((name, nbytes)) for name in compare)
            cells.append(f"{first.median / second.median:.2f}" if first and second else "")
        lines.append(_line(cells, target_results.get(nbytes)))
    return columns, lines


def _methods(
    table: TimingTable, rows: Sequence[TimingRow]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Each method's step, samples per second, and what it adds to the first."""
    columns = ["method", "a step", "samples/s, all ranks", f"over the {table.rivals[0].name}"]
    target_results = {
        target_result.rival: target_result for target_result in check_table_targets(table, rows)
    }
    base = next((row.median for row in rows if row.rival == table.rivals[0].name), None)
    lines = []
    for row in rows:
        over = "" if base is None else f"{row.median / base - 1:.0%}"
        rate = f"{(table.samples or 0) / row.median:.4g}"
        lines.append(_line([row.rival, _cell(row), rate, over], target_results.get(row.rival)))
    return columns, lines
