"""Reports for a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncddp.monitoring.record import Record

__all__ = ["FunctionSink"]


class FunctionSink:
    """Calls a function with each record as a dict; what it raises stops the training loop.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def write(self, records: Sequence[Record]) -> None:
        """Call it once for each record."""
        for record in records:
            self._function(record.as_dict())

    def close(self) -> None:
        """The function is the user's."""
