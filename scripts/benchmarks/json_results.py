"""Benchmark results as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.tables import FigureRow, FigureTable, TimingRow
from benchmarks.targets import TargetResult

__all__ = ["save_json"]


def save_json(
    path: Path,
    facts: Mapping[str, Any],
    rows: Sequence[TimingRow],
    figure_tables: Sequence[tuple[FigureTable, Sequence[FigureRow]]] = (),
    target_results: Sequence[TargetResult] = (),
) -> None:
    """Write the header, every row with its rounds in seconds, sheets and aims."""
    found = {
        "header": dict(facts),
        "results": [_row(row) for row in rows],
        "sheets": [_sheet(figure_table, lines) for figure_table, lines in figure_tables],
        "aims": [asdict(target_result) for target_result in target_results],
    }
    text = json.dumps(found, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _row(row: TimingRow) -> dict[str, Any]:
    return {
        "table": row.table,
        "rival": row.rival,
        "bytes": row.nbytes,
        "median": row.median,
        "quartiles": row.quartiles,
        "calls_per_round": row.calls,
        "rounds": row.seconds,
    }


def _sheet(figure_table: FigureTable, lines: Sequence[FigureRow]) -> dict[str, Any]:
    return {
        "table": figure_table.key,
        "title": figure_table.title,
        "columns": list(figure_table.columns),
        "lines": [asdict(line) for line in lines],
    }
