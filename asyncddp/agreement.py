"""Agreement checks: if a value differs between ranks, all of them raise the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Protocol, TypeAlias, TypeVar

from asyncddp.errors import MismatchError

T = TypeVar("T")
Facts: TypeAlias = Mapping[str, str] | Sequence[str]
"""Values by name, or sentences in an order that does not depend on the rank."""
_SHOWN = 5  # names of a message


class Gather(Protocol):
    """Interface of collective functions that gather one record of a given type from every rank."""

    def __call__(self, mine: T, kind: type[T], /) -> Sequence[T]:
        """Return the records of all ranks, in rank order."""


def agree(
    gather: Gather,
    facts: Facts,
    claim: str,
    remedy: str = "",
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise a MismatchError on all ranks unless their facts are equal; collective.

    Ranks exchange digests first, which makes the check cheap if all facts are equal. ``claim``
    names the requirement, such as "training needs the same model on all ranks".
    """
    digest = sha256(repr(facts).encode()).hexdigest()
    if len(set(gather(digest, str))) == 1:
        return
    if isinstance(facts, Mapping):
        compare(gather(dict(facts), dict[str, str]), claim, remedy, ranks)
    else:
        compare(gather(list(facts), list[str]), claim, remedy, ranks)


def compare(
    every: Sequence[Facts], claim: str, remedy: str = "", ranks: Sequence[int] | None = None
) -> None:
    """Raise a MismatchError for the first rank whose facts differ from those of the lowest one.

    ``ranks`` are the numbers of the ranks, ascending; by default 0, 1, ...
    """
    numbers = range(len(every)) if ranks is None else ranks
    for rank, theirs in zip(numbers, every, strict=True):
        if problem := _difference(every[0], theirs, numbers[0], rank):
            raise MismatchError(f"{claim}, but {problem}{remedy}")


def _difference(first: Facts, other: Facts, lowest: int, rank: int) -> str:
    """Describe how a rank's facts differ from the lowest rank's; empty if they are equal."""
    if not (isinstance(first, Mapping) and isinstance(other, Mapping)):
        pairs = zip_longest(first, other, fillvalue="nothing more")
        unlike = next((pair for pair in pairs if pair[0] != pair[1]), None)
        return f"rank {lowest} has {unlike[0]}, and rank {rank} has {unlike[1]}" if unlike else ""
    lacking = [name for name in first if name not in other]
    more = [name for name in other if name not in first]
    problems = []
    if lacking:
        problems.append(f"rank {lowest} has {_listed(lacking)}, which rank {rank} has not")
    if more:
        problems.append(f"rank {rank} has {_listed(more)}, which rank {lowest} has not")
    changed = [name for name in first if name in other and first[name] != other[name]]
    for name in changed[:_SHOWN]:
        problems.append(
            f"{name} is {first[name]} on rank {lowest} and {other[name]} on rank {rank}"
        )
    if len(changed) > _SHOWN:
        problems.append(f"{len(changed) - _SHOWN} more differ")
    return "; ".join(problems)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
