"""Checks that all ranks have the same settings, made by comparing digests of them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import zip_longest

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import MismatchError
from asyncddp.ops.object_collectives import gather_records

_VERB = "comparison of all ranks"


def require_equal_on_all_ranks(context: Context, claim: str, facts: Sequence[str]) -> None:
    """Raise an error on all ranks unless all have the same facts; collective.

    ``claim`` is what is asked of them, such as "training needs the same model"; ``facts`` are
    sentences about this rank, in an order that does not depend on it.

    Raises:
        MismatchError: On every rank, if any two differ; the message shows the first difference.
    """
    gathered = gather_if_unequal(context, facts) or [[]]
    for rank, theirs in enumerate(gathered):
        for ours, other in zip_longest(gathered[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"rank {context.rank}: {claim}, but rank 0 has {ours}, and rank {rank} has "
                    f"{other}"
                )


def gather_if_unequal(context: Context, facts: Sequence[str]) -> list[list[str]] | None:
    """Gather the facts of all ranks, rank by rank, if any two differ, else None; collective.

    Digests travel first, so that it costs little to find out that all is equal.
    """
    if context.size == 1:
        return None
    with use(context):
        digest = sha256(repr(list(facts)).encode()).hexdigest()
        if len(set(gather_records(digest, str, _VERB))) == 1:
            return None
        return gather_records(list(facts), list[str], _VERB)
