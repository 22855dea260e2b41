"""Where reports go: the contract of sinks. They live on rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncddp.monitoring.record import Record

__all__ = ["Sink"]


class Sink(Protocol):
    """Takes the records of reports. It is called on rank 0's training thread."""

    def write(self, records: Sequence[Record]) -> None:
        """Take the records of one report: of several ranks, or of one that is on its own."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...
