"""Adds up the time that the caller's thread spends on communication, where nothing hides it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar, cast

__all__ = ["Stopwatch", "exposed"]

F = TypeVar("F", bound=Callable[..., Any])


class Stopwatch:
    """Adds up the seconds that are spent inside ``with``; it is not entered twice at a time.

    Attributes:
        seconds: The sum so far.

    Example:
        >>> watch = Stopwatch()
        >>> with watch:
        ...     pass
        >>> 0 < watch.seconds < 1
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


def exposed(method: F) -> F:
    """Count the time of a method as exposed, on the stopwatch of its object's mixer."""

    @wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method, and count its time."""
        with self._mixer.exposed:
            return method(self, *args, **kwargs)

    return cast("F", timed)
