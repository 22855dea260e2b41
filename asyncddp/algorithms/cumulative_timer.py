"""Cumulative timer: adds up the time that the caller's thread spends in averaging rounds."""

from __future__ import annotations

from time import perf_counter


class CumulativeTimer:
    """Context manager that adds up the seconds spent inside it; not re-entrant."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += perf_counter() - self._started
