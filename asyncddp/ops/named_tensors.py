"""Listing of a module's tensors, sorted by name, and a check that they match on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.context import Context
from asyncddp.errors import MismatchError
from asyncddp.ops.settings_agreement import gather_if_unequal

_SHOWN = 5  # names of a message


def tensors_of(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, sorted; a shared one appears once.

    Example:
        >>> list(tensors_of(torch.nn.BatchNorm1d(2), buffers=False))
        ['bias', 'weight']
    """
    every: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        every.update(module.named_buffers(remove_duplicate=False))
    once: dict[int, str] = {}
    for name in sorted(every):
        once.setdefault(id(every[name]), name)
    return {name: every[name] for name in once.values()}


def require_equal_tensors(context: Context, who: str, named: Mapping[str, torch.Tensor]) -> None:
    """Require in the name of ``who`` that all ranks' tensors agree in names, shapes and dtypes.

    Raises:
        MismatchError: On every rank, if any two differ; the message names the tensors that do.
    """
    forms = [
        f"{name}={str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}"
        for name, one in named.items()
    ]
    every = gather_if_unequal(context, sorted(forms)) or []
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
