"""Seconds of more ranks than cores: their start, and what small averages take beside mpi4py's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.subprocess_runs import on_this_machine, run
from benchmarks.tables import FigureRow
from benchmarks.unit_text import time_text

__all__ = ["OversubscribedSeconds", "measure_oversubscribed", "oversubscribed_lines"]

_AT_MOST = 2.0  # times mpi4py's


@dataclass(frozen=True)
class OversubscribedSeconds:
    """Seconds of one number of ranks.

    Attributes:
        ranks: How many there are.
        starts: Of each run: until all had started MPI, and what ``init()`` added.
        calls: For each verb and rival the rounds of each run, one after the other.
    """

    ranks: int
    starts: Sequence[tuple[float, float]]
    calls: Mapping[str, Mapping[str, Sequence[float]]]


def measure_oversubscribed(ranks: int, runs: int, rounds: int) -> OversubscribedSeconds:
    """Start so many ranks on this machine some times, and let rivals take turns in each run."""
    starts: list[tuple[float, float]] = []
    calls: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            out = Path(folder) / "found.json"
            given = ("--ranks", str(ranks), "--rounds", str(rounds), "--out", str(out))
            run(on_this_machine(ranks, "scale.oversubscribed_rank", *given))
            found = json.loads(out.read_text(encoding="utf-8"))
        starts.append(tuple(found["start"]))
        for verb, rival, seconds in found["rows"]:
            calls.setdefault(verb, {}).setdefault(rival, []).extend(seconds)
    return OversubscribedSeconds(ranks, starts, calls)


def oversubscribed_lines(found: Sequence[OversubscribedSeconds]) -> Iterator[FigureRow]:
    """A line for the start and one for each verb."""
    for one in found:
        mpi, own = (median(start[part] for start in one.starts) for part in range(2))
        yield _line(one.ranks, "init(), with MPI's own start", mpi + own, mpi)
        for verb, rivals in one.calls.items():
            ours, by_hand, arrays, function = (median(seconds) for seconds in rivals.values())
            yield _line(one.ranks, verb, ours, by_hand, arrays, function)


def _line(ranks: int, work: str, ours: float, by_hand: float, *others: float) -> FigureRow:
    arrays, function = (time_text(other) for other in others) if others else ("", "")
    cells = (
        f"{ranks} processes",
        work,
        time_text(ours),
        time_text(by_hand),
        arrays,
        function,
        ours / by_hand,
    )
    return FigureRow(cells, f"≤ {_AT_MOST:g} x mpi4py", ours <= _AT_MOST * by_hand)
