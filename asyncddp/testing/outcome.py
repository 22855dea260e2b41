"""What became of a case on each rank, and how that becomes one test result."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncddp.rank_lists import list_ranks

__all__ = ["Outcome", "RanksFailedError", "values"]


@dataclass(frozen=True)
class Outcome:
    """How a case ended on one rank.

    Attributes:
        rank: The rank.
        seconds: How long it took.
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
        """The outcome of a rank that raised."""
        return cls(
            rank=rank,
            seconds=seconds,
            error=type(error).__name__,
            bases=tuple(base.__name__ for base in type(error).__mro__),
            message=str(error),
            trace="".join(traceback.format_exception(error)),
        )


class RanksFailedError(AssertionError):
    """A case failed on some ranks; the message has each one's traceback, the causes first."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        failed.sort(key=lambda outcome: "PeerError" in outcome.bases)
        ranks = list_ranks(outcome.rank for outcome in failed)
        head = f"{ranks} of {len(outcomes)} failed"
        parts = [f"--- rank {outcome.rank} ---\n{outcome.trace.rstrip()}" for outcome in failed]
        super().__init__("\n".join([head, *parts]))


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks returned, in their order.

    Raises:
        RanksFailedError: One of them raised.
    """
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]
