"""Cumulative timer, and a decorator that adds up communication time not hidden by computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class CumulativeTimer:
    """Cumulative timer: a context manager that adds up the seconds spent inside; not re-entrant.

    Attributes:
        seconds: The sum so far.

    Example:
        >>> timer = CumulativeTimer()
        >>> with timer:
        ...     pass
        >>> 0 < timer.seconds < 1
        True
    """

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += perf_counter() - self._started


def count_exposed_time(method: F) -> F:
    """Decorate a method: add its duration to the exposed time of its object's averager."""

    @wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method, and add its duration."""
        with self._averager.exposed_time:
            return method(self, *args, **kwargs)

    return cast("F", timed)
