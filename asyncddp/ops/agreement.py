"""Whether all ranks hold the same, found out before anything depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import zip_longest

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import MismatchError
from asyncddp.ops.objects import gather_records

__all__ = ["agree", "gathered_unless_equal"]

_WHAT = "comparison of all ranks"


def agree(context: Context, claim: str, facts: Sequence[str]) -> None:
    """Compare facts over all ranks; collective.

    Args:
        context: The world.
        claim: What is asked of all ranks, such as "training needs the same model".
        facts: Sentences about this rank, in an order that does not depend on it.

    Raises:
        MismatchError: On every rank, if any two differ; the message shows the first difference.
    """
    every = gathered_unless_equal(context, facts) or [[]]
    for rank, theirs in enumerate(every):
        for ours, other in zip_longest(every[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"rank {context.rank}: {claim}, but rank 0 has {ours}, and rank {rank} has "
                    f"{other}"
                )


def gathered_unless_equal(context: Context, facts: Sequence[str]) -> list[list[str]] | None:
    """Gather facts of all ranks where any two ranks differ; collective.

    Digests travel first, so that it costs little to find out that all is equal.

    Args:
        context: The world.
        facts: Sentences about this rank.

    Returns:
        Element r is rank r's; None if they are equal on all ranks.
    """
    if context.size == 1:
        return None
    with use(context):
        digest = sha256(repr(list(facts)).encode()).hexdigest()
        if len(set(gather_records(digest, str, _WHAT))) == 1:
            return None
        return gather_records(list(facts), list[str], _WHAT)
