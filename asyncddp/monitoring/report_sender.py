"""Sending of monitor reports to rank 0 by one-sided messages, for which no rank waits."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import fields
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.monitoring.rank_record import Record
from asyncddp.monitoring.report_collector import MonitorReport

ROOT = 0
"""The rank that collects the reports of all ranks."""
_FIGURES = len(fields(Record)) - 1  # all but the departed ranks, whose number varies


class ReportSender:
    """Sender of one rank's monitor reports to rank 0; on rank 0 also their receiver.

    The label is equal on all ranks and used by no other sender.
    """

    def __init__(self, context: Context, label: str) -> None:
        self._context, self._service = context, f"monitor/{label}"
        self._engine, self._is_root = context.engine, context.rank == ROOT
        self.arrived: deque[MonitorReport | int] = deque()
        """On rank 0: reports, and ranks that send no more, in order of arrival."""
        if self._is_root:
            with self._engine.active_messages() as active_messages:
                active_messages.handlers[self._service] = self._on_message

    def send(self, report: MonitorReport) -> None:
        """Send a report to rank 0."""
        if self._is_root:
            self.arrived.append(report)
            return
        *facts, departed = report.record.as_dict().values()
        with self._engine.active_messages() as active_messages:
            active_messages.send(ROOT, self._service, (*facts, *departed), report.projection)

    def end(self) -> None:
        """Tell rank 0 that no report follows; does nothing after the context's shutdown."""
        if self._is_root:
            self.arrived.append(ROOT)
            return
        with contextlib.suppress(NotInitializedError), self._engine.active_messages() as messages:
            messages.send(ROOT, self._service, ())

    def close(self) -> None:
        """On rank 0: receive no more reports; does nothing after the context's shutdown."""
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
        self.arrived.append(MonitorReport(Record(*figures), tensor))

    def has_left(self, peer: int) -> bool:
        """Return True if a rank has left the run."""
        try:
            self._engine.wait_guard("monitoring")([peer])
        except PeerError:
            return True
        return False
