"""Reader and summary of the JSON-lines file that ``asyncddp.monitor`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncddp.errors import ArgumentError

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
        """Fraction of a step in which averaging kept the rank from computing."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else None


@dataclass(frozen=True)
class MonitorLog:
    """Contents of a monitor's file: samples by rank and step, the latest if a step is repeated."""

    ranks: Mapping[int, Sequence[MonitorSample]]
    truncated: bool  # the last line is incomplete


def read_monitor_log(path: Path) -> MonitorLog:
    """Read a monitor's file, even while a run is still writing to it."""
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
    ranks: dict[int, list[MonitorSample]] = {}
    for rank, step in sorted(rows):
        ranks.setdefault(rank, []).append(rows[rank, step])
    return MonitorLog(ranks, truncated)


def _parse_sample(line: str, where: str) -> MonitorSample:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(type(found))
    except ValueError as error:
        raise ArgumentError(
            f"{where}: expected a JSON object, got {line[:60]!r}. Give {_HOW}, or delete the line."
        ) from error
    return MonitorSample(
        **{one.name: _parse_number(found, one, where) for one in fields(MonitorSample)}
    )


def _parse_number(found: Mapping[str, Any], field: Field[Any], where: str) -> Any:
    """Return a field's value; the file stores non-finite numbers as strings."""
    name, whole = field.name, field.type == "int"
    if name not in found:
        raise ArgumentError(f"{where}: there is no {name!r}. Give {_HOW}.")
    value = found[name]
    if value is None and field.type == "float | None":
        return None
    if value in ("nan", "inf", "-inf") and not whole:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ArgumentError(f"{where}: {name}: expected {kind}, got {value!r}. Give {_HOW}.")
    return value


def finite_or_none(value: float | None) -> float | None:
    """Return the value if it is finite, else None."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class RankSummary:
    """Summary of one rank's measurements over a monitored run: one row of the report."""

    rank: int
    steps: int  # the last that it has reported
    reports: int  # how many samples
    consensus_distance: float | None  # the last that is known
    gradient_norm: float | None  # the last that is known
    step_seconds: float  # on average
    exposed_share: float  # of the time of a step
    bytes_per_step: float
    staleness: float | None  # the largest; None where the method waits
    monitor_share: float  # of the time of a step


def summarise_ranks(run: MonitorLog) -> list[RankSummary]:
    """Summarise each rank of a run."""
    return [_summarise_rank(rank, rows) for rank, rows in run.ranks.items()]


def slowest_rank(summaries: Sequence[RankSummary]) -> RankSummary:
    """Return the summary of the rank with the most time per step outside averaging."""
    return max(summaries, key=lambda one: one.step_seconds * (1 - one.exposed_share))


def _summarise_rank(rank: int, rows: Sequence[MonitorSample]) -> RankSummary:
    first, last = rows[0], rows[-1]
    spent = sum(row.step_seconds for row in rows) or 1.0
    steps = last.step - first.step
    sent = last.bytes_sent - (first.bytes_sent if steps else 0)
    stale = [row.staleness for row in rows if row.staleness is not None]
    return RankSummary(
        rank=rank,
        steps=last.step,
        reports=len(rows),
        consensus_distance=_last_known([row.consensus_distance for row in rows]),
        gradient_norm=_last_known([row.gradient_norm for row in rows]),
        step_seconds=fmean(row.step_seconds for row in rows),
        exposed_share=sum(row.exposed_seconds for row in rows) / spent,
        bytes_per_step=sent / max(1, steps or last.step),
        staleness=max(stale, default=None),
        monitor_share=sum(row.monitor_seconds for row in rows) / spent,
    )


def _last_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if finite_or_none(value) is not None]
    return known[-1] if known else None
