"""Outcome of a test case on each rank, and the merging of outcomes into one test result."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncddp.rank_list_text import list_ranks


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test case on one rank: its value or its exception.

    Attributes:
        rank, seconds: The rank, and how long it took.
        value: What it returned.
        error: Class name of what it raised, or None.
        bases: Names of that class and all it derives from.
        message: The exception's text.
        trace: Its traceback.
    """

    rank: int
    seconds: float
    value: Any = None
    error: str | None = None
    bases: tuple[str, ...] = ()
    message: str = ""
    trace: str = ""

    @classmethod
    def of(cls, rank: int, seconds: float, error: BaseException) -> Outcome:
        """Create the outcome of a rank that raised an exception."""
        return cls(
            rank=rank,
            seconds=seconds,
            error=type(error).__name__,
            bases=tuple(base.__name__ for base in type(error).__mro__),
            message=str(error),
            trace="".join(traceback.format_exception(error)),
        )


class RanksFailedError(AssertionError):
    """Error of a test case that failed on some ranks, with tracebacks, root causes first."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        failed.sort(key=lambda outcome: "PeerError" in outcome.bases)
        ranks = list_ranks(outcome.rank for outcome in failed)
        head = f"{ranks} of {len(outcomes)} failed"
        parts = [f"--- rank {outcome.rank} ---\n{outcome.trace.rstrip()}" for outcome in failed]
        super().__init__("\n".join([head, *parts]))


def returned_values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the values of all ranks in order; raise RanksFailedError if a rank raised."""
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]
