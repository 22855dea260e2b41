"""Grouping of equal errors that a notebook cell raised on several ranks, to show each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncddp.errors import RankError
from asyncddp.rank_list_text import list_ranks

E = TypeVar("E", bound=BaseException)

_CONSEQUENCES = {
    *("DeadlockError", "MismatchError", "PeerError", "PeerLeftError", "WaitTimeoutError"),
    "KeyboardInterrupt",
}
"""Errors that ranks raise because another rank has failed; not shown beside that failure."""


@dataclass(frozen=True)
class CellFailure:
    """Error raised by a cell on one rank: exception name, message and traceback lines."""

    rank: int
    name: str
    message: str
    lines: Sequence[str] = ()

    @property
    def cause(self) -> tuple[str, str]:
        """Grouping key: exception name, and the message with this rank's number replaced."""
        return self.name, re.sub(rf"\brank {self.rank}\b", "this rank", self.message)


def group_failures(failures: Sequence[CellFailure]) -> RankError:
    """Build one error for all ranks; IPython shows the traceback of each cause once.

    The error's ``rank`` is the lowest with an error that is no consequence.
    """
    began = [failure for failure in failures if failure.name not in _CONSEQUENCES]
    alike: dict[tuple[str, str], list[CellFailure]] = {}
    for failure in sorted(began or failures, key=lambda failure: failure.rank):
        alike.setdefault(failure.cause, []).append(failure)
    heads, lines = [], []
    for group in alike.values():
        first = group[0]
        text = f"{first.name}: {first.message}" if first.message else first.name
        heads.append(f"{list_ranks(failure.rank for failure in group)}: {text}")
        lines += [*first.lines, "", heads[-1]]
    after = [failure for failure in failures if failure not in began]
    if began and after:
        names = ", ".join(sorted({failure.name for failure in after}))
        heads.append(f"{list_ranks(failure.rank for failure in after)}: {names}, in consequence")
        lines.append(heads[-1])
    error = RankError(next(iter(alike.values()))[0].rank, "\n".join(heads))
    return with_traceback_lines(error, lines)


def with_traceback_lines(error: E, lines: Sequence[str]) -> E:
    """Make IPython show these lines in place of an error's traceback."""
    setattr(error, "_render_traceback_", lambda: list(lines))  # noqa: B010 - only IPython knows it
    return error
