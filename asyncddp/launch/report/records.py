"""The lines of JSON that a monitor has written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncddp.errors import ArgumentError

__all__ = ["Row", "Run", "finite", "read"]

_COUNTS = ("rank", "step", "bytes_sent")
_TIMES = ("step_seconds", "exposed_seconds", "monitor_seconds")
_MAY_BE_NULL = ("consensus_distance", "gradient_norm", "staleness")
_HOW = "a file that asyncddp.monitor(…, to='run.jsonl') has written"


@dataclass(frozen=True)
class Row:
    """One rank at one report; see :class:`asyncddp.monitoring.Record`."""

    rank: int
    step: int
    bytes_sent: int
    step_seconds: float
    exposed_seconds: float
    monitor_seconds: float
    consensus_distance: float | None
    gradient_norm: float | None
    staleness: float | None

    @property
    def exposed_share(self) -> float | None:
        """The share of a step that averaging took on the caller's thread."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else None


@dataclass(frozen=True)
class Run:
    """A run's reports.

    Attributes:
        ranks: The rows of each rank by step; of two of the same step the later one.
        cut: Whether the last line was not written to its end.
    """

    ranks: Mapping[int, Sequence[Row]]
    cut: bool


def read(path: Path) -> Run:
    """Read a file of reports.

    Args:
        path: The file; it may still be written.

    Raises:
        ArgumentError: It cannot be read, is empty, or a line of it is something else; the message
            names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(f"{path}: cannot be read: {why}. Give {_HOW}.") from error
    lines = text.split("\n")
    cut = bool(lines.pop())  # what follows the last end of line
    rows: dict[tuple[int, int], Row] = {}
    for number, line in enumerate(lines, 1):
        row = _row(line, f"{path}, line {number}")
        rows[row.rank, row.step] = row
    if not rows:
        raise ArgumentError(
            f"{path}: there is no report in it yet. Reports come every 50 steps unless monitor(…, "
            "every=…) says otherwise; train longer, or report more often."
        )
    ranks = sorted({rank for rank, _ in rows})
    ordered = [rows[key] for key in sorted(rows)]
    return Run({rank: [row for row in ordered if row.rank == rank] for rank in ranks}, cut)


def _row(line: str, where: str) -> Row:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ArgumentError(
            f"{where}: expected a JSON object, got {line[:60]!r}. Give {_HOW}, or delete the line."
        ) from error
    if not isinstance(found, dict):
        raise ArgumentError(
            f"{where}: expected a JSON object, got {line[:60]!r}. Give {_HOW}, or delete the line."
        )
    values: dict[str, Any] = {
        name: _number(found, name, where) for name in (*_COUNTS, *_TIMES, *_MAY_BE_NULL)
    }
    return Row(**values)


def _number(found: Mapping[str, Any], name: str, where: str) -> Any:
    """A field's value; what is not finite stands there as a string."""
    if name not in found:
        raise ArgumentError(f"{where}: there is no {name!r}. Give {_HOW}.")
    value = found[name]
    if value is None and name in _MAY_BE_NULL:
        return None
    if value in ("nan", "inf", "-inf") and name not in _COUNTS:
        return float(value)
    whole = name in _COUNTS
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ArgumentError(f"{where}: {name}: expected {kind}, got {value!r}. Give {_HOW}.")
    return value


def finite(value: float | None) -> float | None:
    """A number that can be drawn or averaged, else None."""
    return value if value is not None and math.isfinite(value) else None
