"""Brings the ranks' reports together and finds their distances. Tables without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from asyncddp.monitoring.record import Record
from asyncddp.monitoring.sketch import distances

__all__ = ["Gathering", "Report"]


@dataclass(frozen=True)
class Report:
    """What a rank reports.

    Attributes:
        record: Its figures.
        sketch: The projection of its parameters, where distances are found by that.
    """

    record: Record
    sketch: torch.Tensor | None = None


class Gathering:
    """The reports of all ranks, as they come.

    Where ranks go in step, the reports of one step are kept until all ranks that are there have
    sent theirs, or there are more than ``patience`` later ones, and those by ``seconds``. Of a rank
    without a report of that step, its last projection counts; before its first, nobody's distance
    is known.

    Args:
        size: Number of ranks.
        patience: Later reports for which a step waits; 0: each report stands for itself.
        seconds: How much later they must be: quick steps are over before a message has come.

    Example:
        >>> def report(rank, x):
        ...     record = Record(rank, 50, 0.0, None, 0.1, None, 0.0, 0.0, 0.0, 0, None)
        ...     return Report(record, torch.tensor([x]))
        >>> gathering = Gathering(2, patience=2)
        >>> gathering.add(report(0, 1.0))
        []
        >>> [[record.consensus_distance for record in one] for one in gathering.add(report(1, 4.0))]
        [[1.5, 1.5]]
    """

    def __init__(self, size: int, patience: int, seconds: float = 0.0) -> None:
        self._size, self._patience, self._seconds = size, patience, seconds
        self._there = set(range(size))
        self._sketches: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, dict[int, Report]] = {}

    @property
    def there(self) -> set[int]:
        """The ranks that may report again."""
        return set(self._there)

    def add(self, report: Report) -> list[list[Record]]:
        """Take a report; gives the records of every step that is complete by that."""
        record = report.record
        if report.sketch is not None:
            self._sketches[record.rank] = report.sketch
        if not self._patience:
            return [self._finished({record.rank: report})]
        self._waiting.setdefault(record.step, {})[record.rank] = report
        return self._complete()

    def leave(self, rank: int) -> list[list[Record]]:
        """A rank will not report again; gives what nobody has to wait for any more."""
        self._there.discard(rank)
        return self._complete()

    def rest(self) -> list[list[Record]]:
        """Everything that still waits."""
        every = [self._waiting.pop(step) for step in sorted(self._waiting)]
        return [self._finished(reports) for reports in every]

    def _complete(self) -> list[list[Record]]:
        steps = sorted(self._waiting)
        late = [step for step in steps[: -self._patience] if self._age(step) >= self._seconds]
        ready = [
            step for step in steps if step in late or self._there <= self._waiting[step].keys()
        ]
        return [self._finished(self._waiting.pop(step)) for step in ready]

    def _age(self, step: int) -> float:
        """Seconds between the first report of a step and the last of any that waits."""
        times = {
            k: [one.record.time for one in found.values()] for k, found in self._waiting.items()
        }
        return max(map(max, times.values())) - min(times[step])

    def _finished(self, reports: Mapping[int, Report]) -> list[Record]:
        """The records of one report, with distances."""
        found = self._distances(reports.values())
        return [
            reports[rank].record
            if reports[rank].sketch is None
            else replace(reports[rank].record, consensus_distance=found.get(rank))
            for rank in sorted(reports)
        ]

    def _distances(self, reports: Iterable[Report]) -> dict[int, float]:
        own = {r.record.rank: r.sketch for r in reports if r.sketch is not None}
        sketches = {**self._sketches, **own}
        if len(sketches) < self._size:
            return {}
        return dict(zip(sketches, distances(sketches.values()), strict=True))
