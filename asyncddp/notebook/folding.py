"""Errors of many ranks as one: each that is the same on several ranks is shown once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncddp.errors import RankError
from asyncddp.rank_lists import list_ranks

__all__ = ["Failure", "folded", "in_ipython"]

E = TypeVar("E", bound=BaseException)

_CONSEQUENCES = {
    *("DeadlockError", "MismatchError", "PeerError", "PeerLeftError", "WaitTimeoutError"),
    "KeyboardInterrupt",
}
"""What ranks raise when another one has failed; beside the failure itself these are not shown."""


@dataclass(frozen=True)
class Failure:
    """What a cell raised on one rank.

    Attributes:
        rank: The rank.
        name: Name of the exception's class.
        message: Its text.
        lines: Its traceback, as shown.
    """

    rank: int
    name: str
    message: str
    lines: Sequence[str] = ()

    @property
    def cause(self) -> tuple[str, str]:
        """What ranks have in common that fail alike: each speaks of itself by its own number."""
        return self.name, re.sub(rf"\brank {self.rank}\b", "this rank", self.message)


def folded(failures: Sequence[Failure]) -> RankError:
    """One error for all; in IPython it shows the traceback of each cause once, causes first.

    Args:
        failures: What the ranks raised, at least one.

    Returns:
        The error; its ``rank`` is the lowest of those that began.

    Example:
        >>> print(folded([Failure(rank, "ValueError", "bad") for rank in range(4)]))
        ranks 0–3: ValueError: bad
    """
    began = [failure for failure in failures if failure.name not in _CONSEQUENCES]
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted(began or failures, key=lambda failure: failure.rank):
        alike.setdefault(failure.cause, []).append(failure)
    heads = [_head(group) for group in alike.values()]
    lines = [
        line
        for group, head in zip(alike.values(), heads, strict=True)
        for line in (*group[0].lines, "", head)
    ]
    after = [failure for failure in failures if failure not in began]
    if began and after:
        names = ", ".join(sorted({failure.name for failure in after}))
        heads.append(f"{list_ranks(failure.rank for failure in after)}: {names}, in consequence")
        lines.append(heads[-1])
    error = RankError(next(iter(alike.values()))[0].rank, "\n".join(heads))
    return in_ipython(error, lines)


def in_ipython(error: E, lines: Sequence[str]) -> E:
    """Let IPython show these lines for an error, in place of a traceback of our own frames."""
    setattr(error, "_render_traceback_", lambda: list(lines))  # noqa: B010 - only IPython knows it
    return error


def _head(alike: Sequence[Failure]) -> str:
    first = alike[0]
    text = f"{first.name}: {first.message}" if first.message else first.name
    return f"{list_ranks(failure.rank for failure in alike)}: {text}"
