"""Reads the JSON-lines file into which ``asyncddp.monitor`` writes measurements of training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncddp.errors import ArgumentError

_COUNTS = ("rank", "step", "bytes_sent")
_TIMES = ("step_seconds", "exposed_seconds", "monitor_seconds")
_MAY_BE_NULL = ("consensus_distance", "gradient_norm", "staleness")
_HOW = "a file that asyncddp.monitor(…, to='run.jsonl') has written"


@dataclass(frozen=True)
class MonitorSample:
    """Measurements of one rank at one training step, from one line of a monitor's file."""

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
        """Share of a step in which averaging kept the rank from computing."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else None


@dataclass(frozen=True)
class MonitorLog:
    """Contents of a monitor's file: the measurements of each rank, by step.

    Attributes:
        ranks: The samples of each rank by step; of two of the same step the later one.
        truncated: Whether the last line is incomplete.
    """

    ranks: Mapping[int, Sequence[MonitorSample]]
    truncated: bool


def read_monitor_log(path: Path) -> MonitorLog:
    """Read a monitor's file.

    Args:
        path: The file; a run may still be writing to it.

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
    truncated = bool(lines.pop())  # what follows the last end of line
    rows: dict[tuple[int, int], MonitorSample] = {}
    for number, line in enumerate(lines, 1):
        row = _parse_sample(line, f"{path}, line {number}")
        rows[row.rank, row.step] = row
    if not rows:
        raise ArgumentError(
            f"{path}: there is no report in it yet. Reports come every 50 steps unless monitor(…, "
            "every=…) says otherwise; train longer, or report more often."
        )
    ranks = sorted({rank for rank, _ in rows})
    ordered = [rows[key] for key in sorted(rows)]
    return MonitorLog(
        {rank: [row for row in ordered if row.rank == rank] for rank in ranks}, truncated
    )


def _parse_sample(line: str, where: str) -> MonitorSample:
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
        name: _parse_number(found, name, where) for name in (*_COUNTS, *_TIMES, *_MAY_BE_NULL)
    }
    return MonitorSample(**values)


def _parse_number(found: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field's value; numbers that are not finite are strings in the file."""
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


def finite_or_none(value: float | None) -> float | None:
    """Return the value if it is finite, else None."""
    return value if value is not None and math.isfinite(value) else None
