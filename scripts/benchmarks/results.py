"""Results for programs: JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.aims import Verdict
from benchmarks.contract import Line, Row, Sheet

__all__ = ["save_json"]


def save_json(
    path: Path,
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    sheets: Sequence[tuple[Sheet, Sequence[Line]]] = (),
    verdicts: Sequence[Verdict] = (),
) -> None:
    """Write the header, every row with its rounds in seconds, sheets and aims."""
    found = {
        "header": dict(facts),
        "results": [_row(row) for row in rows],
        "sheets": [_sheet(sheet, lines) for sheet, lines in sheets],
        "aims": [asdict(verdict) for verdict in verdicts],
    }
    text = json.dumps(found, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _row(row: Row) -> dict[str, Any]:
    return {
        "table": row.table,
        "rival": row.rival,
        "bytes": row.nbytes,
        "median": row.median,
        "quartiles": row.quartiles,
        "calls_per_round": row.calls,
        "rounds": row.seconds,
    }


def _sheet(sheet: Sheet, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "table": sheet.key,
        "title": sheet.title,
        "columns": list(sheet.columns),
        "lines": [asdict(line) for line in lines],
    }
