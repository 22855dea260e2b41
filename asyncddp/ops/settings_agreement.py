"""Checks, by comparing digests, that all ranks have equal settings, tensor names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import MismatchError
from asyncddp.ops.object_collectives import gather_records

_SHOWN = 5  # names of a message


def require_equal_on_all_ranks(context: Context, claim: str, facts: Sequence[str]) -> None:
    """Raise MismatchError on all ranks unless all have the same facts; collective.

    ``claim`` is what is asked of them, such as "training needs the same model"; ``facts`` are
    sentences about this rank, in an order that does not depend on it.
    """
    gathered = _gather_if_unequal(context, claim.partition(" need")[0], facts)
    for rank, theirs in enumerate(gathered):
        for ours, other in zip_longest(gathered[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"rank {context.rank}: {claim}, but rank 0 has {ours}, and rank {rank} has "
                    f"{other}"
                )


def _gather_if_unequal(context: Context, who: str, facts: Sequence[str]) -> list[list[str]]:
    """Gather the facts of all ranks if any two ranks differ, else an empty list; collective.

    ``who`` needs it, by whose name messages call the comparison.

    Digests travel first, so that it costs little to find out that all is equal.
    """
    if context.size == 1:
        return []
    with use(context):
        digest = sha256(repr(list(facts)).encode()).hexdigest()
        if len(set(gather_records(digest, str, who))) == 1:
            return []
        return gather_records(list(facts), list[str], who)


def tensors_of(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, sorted; a shared one appears once."""
    every: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        every.update(module.named_buffers(remove_duplicate=False))
    once: dict[int, str] = {}
    for name in sorted(every):
        once.setdefault(id(every[name]), name)
    return {name: every[name] for name in once.values()}


def require_equal_tensors(context: Context, who: str, named: Mapping[str, torch.Tensor]) -> None:
    """Raise MismatchError on all ranks unless their tensors agree in names, shapes and dtypes.

    The message says that ``who`` needs it, and names the tensors that differ.
    """
    forms = [
        f"{name}={str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}"
        for name, one in named.items()
    ]
    every = _gather_if_unequal(context, who, sorted(forms))
    known = [dict(form.rsplit("=", 1) for form in theirs) for theirs in every]
    for rank, theirs in enumerate(known):
        problem = _difference(known[0], theirs, rank)
        if problem:
            raise MismatchError(
                f"rank {context.rank}: {who} needs tensors of the same names, shapes and dtypes on "
                f"all ranks, but {problem}. Build the same model on all ranks"
            )


def _difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    """Describe how the tensors of a rank differ from those of rank 0; empty if they do not."""
    lacking = [name for name in first if name not in other]
    more = [name for name in other if name not in first]
    problems = []
    if lacking:
        problems.append(f"rank 0 has {_listed(lacking)}, which rank {rank} has not")
    if more:
        problems.append(f"rank {rank} has {_listed(more)}, which rank 0 has not")
    unlike = [name for name in first if name in other and first[name] != other[name]]
    for name in unlike[:_SHOWN]:
        problems.append(f"{name} is {first[name]} on rank 0 and {other[name]} on rank {rank}")
    if len(unlike) > _SHOWN:
        problems.append(f"{len(unlike) - _SHOWN} more differ")
    return "; ".join(problems)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
