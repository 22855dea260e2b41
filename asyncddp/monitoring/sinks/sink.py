"""Protocol of sinks, which write monitor reports on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncddp.monitoring.rank_record import Record


class Sink(Protocol):
    """Destination of monitor records, such as a console or a file; called on rank 0 only."""

    def write(self, records: Sequence[Record]) -> None:
        """Write the records of one report, of one or several ranks."""
        ...

    def close(self) -> None:
        """Release the sink's resources; no record follows."""
        ...
