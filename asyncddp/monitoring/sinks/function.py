"""Sink that calls a function of the user with each record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncddp.monitoring.rank_record import Record


class FunctionSink:
    """Sink that calls a function with each record as a dict; its exceptions propagate.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def write(self, records: Sequence[Record]) -> None:
        """Call the function once for each record."""
        for record in records:
            self._function(record.as_dict())

    def close(self) -> None:
        """Do nothing: the function belongs to the user."""
