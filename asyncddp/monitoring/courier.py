"""Takes reports to rank 0 without anybody waiting: one-sided messages to a service there."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.monitoring.gathering import Report
from asyncddp.monitoring.record import Record

__all__ = ["ROOT", "Courier"]

ROOT = 0
"""The rank that gathers the reports of all."""
_FIGURES = len(fields(Record)) - 1  # all but who has departed, which may be several


class Courier:
    """The way from each rank to the root.

    Args:
        context: The world.
        label: Equal on all ranks, and of nobody else.

    Attributes:
        arrived: On the root: reports, and the numbers of ranks that have ended, as they came.
    """

    def __init__(self, context: Context, label: str) -> None:
        self._context, self._service = context, f"monitor/{label}"
        self.arrived: deque[Report | int] = deque()
        if context.rank == ROOT:
            with context.engine.parcels() as parcels:
                parcels.services[self._service] = self._hear

    def send(self, report: Report) -> None:
        """Hand a report in."""
        if self._context.rank == ROOT:
            self.arrived.append(report)
            return
        *facts, departed = report.record.as_dict().values()
        with self._context.engine.parcels() as parcels:
            parcels.send(ROOT, self._service, (*facts, *departed), report.sketch)

    def end(self) -> None:
        """Say that no report follows; nothing, after the end of the world."""
        if self._context.rank == ROOT:
            self.arrived.append(ROOT)
            return
        try:
            with self._context.engine.parcels() as parcels:
                parcels.send(ROOT, self._service, ())
        except NotInitializedError:
            return

    def attend(self) -> bool:
        """On the root: make a round of progress; whether anything moved."""
        return self._context.engine.progress()

    def close(self) -> None:
        """On the root: take no more."""
        if self._context.rank != ROOT:
            return
        try:
            with self._context.engine.parcels() as parcels:
                parcels.services.pop(self._service, None)
        except NotInitializedError:
            return

    def _hear(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Take what a rank says; called by the engine, on any thread."""
        if not content:
            self.arrived.append(peer)
            return
        figures = (*content[:_FIGURES], tuple(content[_FIGURES:]))
        self.arrived.append(Report(Record(*figures), tensor))

    def gone(self, peer: int) -> bool:
        """Whether a rank has left the world."""
        try:
            self._context.engine.patience("monitoring")([peer])
        except PeerError:
            return True
        return False
