"""Collection of monitor reports on rank 0, grouped by step, with consensus distances."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.monitoring.random_projection import distances
from asyncddp.monitoring.rank_record import Record

ROOT = 0
"""The rank that collects the reports of all ranks."""
_FIGURES = len(fields(Record)) - 1  # all but the departed ranks, whose number varies


@dataclass(frozen=True)
class RankStepReport:
    """Record of one rank at one step, with a random projection of its parameters."""

    record: Record
    projection: torch.Tensor | None = None


class ReportCollector:
    """Collector of all ranks' reports: groups them by step and adds consensus distances.

    The reports of one step are kept until all active ranks have sent theirs, or there are more than
    ``patience`` steps that are later by ``seconds``: quick steps may end before a message has
    arrived. With no patience, no step waits. For a rank without a report of that step its last
    projection counts; before its first, no distance is known.
    """

    def __init__(self, size: int, patience: int, seconds: float = 0.0) -> None:
        self._size, self._patience, self._seconds = size, patience, seconds
        self.active = set(range(size))
        """The ranks that may report again."""
        self._projections: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, dict[int, RankStepReport]] = {}

    def add(self, report: RankStepReport) -> list[list[Record]]:
        """Add a report; return the records of every step that is now complete."""
        record = report.record
        if report.projection is not None:
            self._projections[record.rank] = report.projection
        if not self._patience:
            return [self._finished({record.rank: report})]
        self._waiting.setdefault(record.step, {})[record.rank] = report
        return self._complete()

    def remove(self, rank: int) -> list[list[Record]]:
        """Remove a rank that sends no more reports; return records of steps now complete."""
        self.active.discard(rank)
        return self._complete()

    def drain(self) -> list[list[Record]]:
        """Return the records of all incomplete steps."""
        return [self._finished(self._waiting.pop(step)) for step in sorted(self._waiting)]

    def _complete(self) -> list[list[Record]]:
        steps = sorted(self._waiting)
        late = [step for step in steps[: -self._patience] if self._age(step) >= self._seconds]
        ready = [
            step for step in steps if step in late or self.active <= self._waiting[step].keys()
        ]
        return [self._finished(self._waiting.pop(step)) for step in ready]

    def _age(self, step: int) -> float:
        """Return the seconds from a step's first report to the newest waiting report."""
        every = [one.record for found in self._waiting.values() for one in found.values()]
        return max(one.time for one in every) - min(one.time for one in every if one.step == step)

    def _finished(self, reports: Mapping[int, RankStepReport]) -> list[Record]:
        own = {r: one.projection for r, one in reports.items() if one.projection is not None}
        projections = {**self._projections, **own}
        found = dict.fromkeys(projections, None)
        if len(projections) == self._size:
            found |= zip(projections, distances(projections.values()), strict=True)
        records = [reports[rank].record for rank in sorted(reports)]
        return [
            replace(one, consensus_distance=found[one.rank]) if one.rank in own else one
            for one in records
        ]


class ReportExchange:
    """Transfer of monitor reports from every rank to rank 0."""

    def __init__(self, context: Context, label: str) -> None:
        self._context, self._service = context, f"monitor/{label}"
        self._engine, self._is_root = context.engine, context.rank == ROOT
        self.arrived: deque[RankStepReport | int] = deque()
        """On rank 0: reports, and ranks that send no more, in order of arrival."""
        if self._is_root:
            with self._engine.active_messages() as active_messages:
                active_messages.handlers[self._service] = self._on_message

    def send(self, report: RankStepReport) -> None:
        """Send a report to rank 0."""
        if self._is_root:
            self.arrived.append(report)
            return
        *facts, departed = report.record.as_dict().values()
        with self._engine.active_messages() as active_messages:
            active_messages.send(ROOT, self._service, (*facts, *departed), report.projection)

    def end(self) -> None:
        """Tell rank 0 that no more reports follow; do nothing after the context's shutdown."""
        if self._is_root:
            self.arrived.append(ROOT)
            return
        with contextlib.suppress(NotInitializedError), self._engine.active_messages() as messages:
            messages.send(ROOT, self._service, ())

    def close(self) -> None:
        """Stop receiving reports on rank 0; do nothing after the context's shutdown."""
        if not self._is_root:
            return
        with contextlib.suppress(NotInitializedError), self._engine.active_messages() as messages:
            messages.handlers.pop(self._service, None)

    def _on_message(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Handle a rank's message; called by the engine, on any thread."""
        if not content:
            self.arrived.append(peer)
            return
        figures = (*content[:_FIGURES], tuple(content[_FIGURES:]))
        self.arrived.append(RankStepReport(Record(*figures), tensor))

    def has_left(self, peer: int) -> bool:
        """Return True if a rank has left the run."""
        try:
            self._engine.watchdog.wait_guard("monitoring")([peer])
        except PeerError:
            return True
        return False
