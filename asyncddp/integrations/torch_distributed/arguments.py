"""Arguments that torch passes to verbs, in old and new forms: lists or tensors, options or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp


@dataclass(frozen=True)
class VerbOptions:
    """Options of one call.

    Attributes:
        op: Reduction operator.
        root: Root rank in the group.
        timeout: Seconds; None for the group's.
        blocking: True if the caller waits at once.
    """

    op: Any = ReduceOp.SUM
    root: int = 0
    timeout: float | None = None
    blocking: bool = False


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list of tensors, also for one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(tensors: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return a list of lists of tensors, also for one list."""
    if tensors and isinstance(tensors[0], torch.Tensor):
        return [list(tensors)]
    return [list(inner) for inner in tensors]


def verb_options(
    given: Any = None,
    *,
    op: Any = None,
    root: int | None = None,
    timeout: timedelta | None = None,
) -> VerbOptions:
    """Return a call's options, from one of torch's option classes, an operator, a root or none."""
    if isinstance(given, timedelta):
        given, timeout = None, given
    if isinstance(given, int) and not isinstance(given, bool):
        given, root = None, given
    if given is not None and not hasattr(given, "timeout"):
        given, op = None, given
    timeout = getattr(given, "timeout", None) if timeout is None else timeout
    seconds = None if timeout is None else timeout.total_seconds()
    return VerbOptions(
        op=getattr(given, "reduceOp", ReduceOp.SUM) if op is None else op,
        root=getattr(given, "rootRank", 0) if root is None else root,
        timeout=seconds if seconds is not None and seconds > 0 else None,
        blocking=not getattr(given, "asyncOp", True),
    )
