"""Seconds of more ranks than cores: their start, and what small averages take beside mpi4py's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.subprocess_runs import on_this_machine, run_for_json
from benchmarks.tables import FigureRow
from benchmarks.unit_text import time_text

__all__ = ["OversubscribedSeconds", "measure_oversubscribed", "oversubscribed_lines"]

_AT_MOST = 2.0  # times mpi4py's


@dataclass(frozen=True)
class OversubscribedSeconds:
    """Seconds of one number of ranks.

    Attributes:
        ranks: How many there are.
        starts: Of each run: MPI's start, loading asyncddp, and ``init()``.
        calls: For each verb and rival the rounds of each run, one after the other.
    """

    ranks: int
    starts: Sequence[Sequence[float]]
    calls: Mapping[str, Mapping[str, Sequence[float]]]


def measure_oversubscribed(ranks: int, runs: int, rounds: int) -> OversubscribedSeconds:
    """Start so many ranks on this machine some times, and let rivals take turns in each run."""
    starts: list[Sequence[float]] = []
    calls: dict[str, dict[str, list[float]]] = {}
    given = ("--ranks", str(ranks), "--rounds", str(rounds))
    for _ in range(runs):
        found = run_for_json(on_this_machine(ranks, "scale.oversubscribed_rank", *given))
        starts.append(found["start"])
        for verb, rival, seconds in found["rows"]:
            calls.setdefault(verb, {}).setdefault(rival, []).extend(seconds)
    return OversubscribedSeconds(ranks, starts, calls)


def oversubscribed_lines(found: OversubscribedSeconds) -> Iterator[FigureRow]:
    """Two lines for the start and one for each verb."""
    mpi, load, init = (median(parts) for parts in zip(*found.starts, strict=True))
    yield _line(found.ranks, "MPI's start and init()", mpi + init, mpi)
    yield _line(found.ranks, "the same and loading asyncddp", mpi + load + init, mpi)
    for verb, rivals in found.calls.items():
        ours, by_hand, arrays, function = (median(seconds) for seconds in rivals.values())
        yield _line(found.ranks, verb, ours, by_hand, arrays, function)


def _line(ranks: int, work: str, ours: float, by_hand: float, *others: float) -> FigureRow:
    arrays, function = (time_text(other) for other in others) if others else ("", "")
    times = (time_text(ours), time_text(by_hand), arrays, function)
    cells = (f"{ranks} processes", work, *times, ours / by_hand)
    return FigureRow(cells, f"≤ {_AT_MOST:g} x mpi4py", ours <= _AT_MOST * by_hand)
