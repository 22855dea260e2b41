"""Cumulative timer: how long rounds take on the caller's thread, in all."""

from __future__ import annotations

from time import perf_counter


class CumulativeTimer:
    """Cumulative timer: a context manager that adds up the seconds spent inside; not re-entrant."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += perf_counter() - self._started
