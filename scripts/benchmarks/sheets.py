"""A table that was measured on ranks of its own, as finished figures that can be carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.aims import judge_table, short
from benchmarks.contract import Line, Row, Sheet, Table
from benchmarks.own_report import finished
from benchmarks.units import size_text, time_text

__all__ = ["Carried", "as_sheet"]


@dataclass(frozen=True)
class Carried:
    """A sheet with its lines, in what JSON can carry."""

    key: str
    title: str
    columns: Sequence[str]
    lines: Sequence[Mapping[str, Any]]
    note: str

    def opened(self) -> tuple[Sheet, Sequence[Line]]:
        """The sheet and its lines."""
        lines = [Line(tuple(one["cells"]), one["aim"], one["met"]) for one in self.lines]
        return finished(self.key, self.title, self.columns, lines, self.note)


def as_sheet(table: Table, rows: Sequence[Row]) -> Carried:
    """Median and spread of a table's rivals: a line for each size, or each method of a step."""
    lines = _methods if table.samples is not None else _sizes
    columns, found = lines(table, rows)
    return Carried(table.key, table.title, columns, found, table.note)


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{time_text(row.median)} ±{row.spread:.0%}"


def _line(cells: Sequence[str], verdict: Any = None) -> dict[str, Any]:
    if verdict is None:
        return {"cells": list(cells), "aim": None, "met": None}
    told = f" ({verdict.found})" if verdict.met is False and verdict.found else ""
    return {"cells": list(cells), "aim": verdict.words + told, "met": verdict.met}


def _sizes(table: Table, rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    found = {(row.rival, row.nbytes): row for row in rows}
    names = [one.name for one in table.rivals if any(row.rival == one.name for row in rows)]
    compare = table.compare or ()
    compared = len(compare) == 2 and set(compare) <= set(names)
    columns = [table.size_is, *names]
    columns += [" ÷ ".join(map(short, compare))] if compared else []
    verdicts = {verdict.nbytes: verdict for verdict in judge_table(table, rows)}
    lines = []
    for nbytes in sorted({row.nbytes for row in rows}):
        cells = [size_text(nbytes), *(_cell(found.get((name, nbytes))) for name in names)]
        if compared:
            first, second = (found.get((name, nbytes)) for name in compare)
            cells.append(f"{first.median / second.median:.2f}" if first and second else "")
        lines.append(_line(cells, verdicts.get(nbytes)))
    return columns, lines


def _methods(table: Table, rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    """Each method's step, samples per second, and what it adds to the first."""
    columns = ["method", "a step", "samples/s, all ranks", f"over the {table.rivals[0].name}"]
    verdicts = {verdict.rival: verdict for verdict in judge_table(table, rows)}
    base = next((row.median for row in rows if row.rival == table.rivals[0].name), None)
    lines = []
    for row in rows:
        over = "" if base is None else f"{row.median / base - 1:.0%}"
        rate = f"{(table.samples or 0) / row.median:.4g}"
        lines.append(_line([row.rival, _cell(row), rate, over], verdicts.get(row.rival)))
    return columns, lines
