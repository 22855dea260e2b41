"""Results for people and for programs: tables in Markdown's form, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.console import Console

from benchmarks.contract import Row, Table

__all__ = ["save_json", "show_header", "show_table", "size_text", "time_text"]


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < base * 0.9995:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"


def size_text(nbytes: float) -> str:
    """Such as ``64 KB``."""
    return _scaled(nbytes, 1024, ("B", "KB", "MB", "GB"))


def time_text(seconds: float) -> str:
    """Such as ``4.53 µs``."""
    return _scaled(seconds * 1e6, 1000, ("µs", "ms", "s"))


def show_header(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what was measured where."""
    for key, value in facts.items():
        console.print(f"{key.replace('_', ' '):>16}  {value}", markup=False)


def show_table(
    console: Console, table: Table, rows: Sequence[Row], missing: Mapping[str, str]
) -> None:
    """Print median and spread of every rival, and the ratio of the first to the second."""
    names = [rival.name for rival in table.rivals if rival.name not in missing]
    found = {(row.rival, row.nbytes): row for row in rows}
    ratio = [rival.name for rival in table.rivals[:2]]
    shown = rich.table.Table(box=rich.box.MARKDOWN)
    shown.add_column(table.size_is, justify="right", no_wrap=True)
    for name in names:
        shown.add_column(name, justify="right")
    compared = not set(ratio) & set(missing)
    if compared:
        shown.add_column("first ÷ second", justify="right")
    for nbytes in table.sizes:
        cells = [found[name, nbytes] for name in names]
        line = [f"{time_text(row.median)} ±{row.spread:.0%}" for row in cells]
        if compared:
            line.append(f"{cells[0].median / cells[1].median:.2f}")
        shown.add_row(size_text(nbytes), *line)
    console.print(f"{table.title}\n", markup=False)
    console.print(shown)
    for name, reason in missing.items():
        console.print(f"{name} was not measured: {reason}", markup=False)
    console.print()


def save_json(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the header and every row with its rounds, in seconds."""
    results = [
        {
            "table": row.table,
            "rival": row.rival,
            "bytes": row.nbytes,
            "median": row.median,
            "quartiles": row.quartiles,
            "calls_per_round": row.calls,
            "rounds": row.seconds,
        }
        for row in rows
    ]
    text = json.dumps({"header": facts, "results": results}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
