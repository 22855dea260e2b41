"""Whether all ranks hold the same, found out before anything depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import MismatchError
from asyncddp.ops.objects import gather_records

__all__ = ["agree"]


def agree(context: Context, claim: str, facts: Sequence[str]) -> None:
    """Compare facts over all ranks; collective.

    Args:
        context: The world.
        claim: What is asked of all ranks, such as "training needs the same model".
        facts: Sentences about this rank, in an order that does not depend on it.

    Raises:
        MismatchError: On every rank, if any two differ; the message shows the first difference.
    """
    if context.size == 1:
        return
    with use(context):
        every = gather_records(list(facts), list[str], "comparison of all ranks")
    for rank, theirs in enumerate(every):
        for ours, other in zip_longest(every[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"rank {context.rank}: {claim}, but rank 0 has {ours}, and rank {rank} has "
                    f"{other}"
                )
