"""Normalisation of torch.distributed's collective arguments, such as tensors or lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from asyncddp.errors import ArgumentError

DEVICES = ("cpu", "cuda")
MAX_TAG = 32766
"""Largest tag of a message."""


@dataclass(frozen=True)
class VerbOptions:
    """Options of one call of a torch.distributed collective.

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
    """Return a list of tensors; wrap a single tensor in a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(tensors: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return a list of lists of tensors; wrap a single list in a list."""
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
    """Return a call's options, from torch's option class, an operator, a root or nothing."""
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


def check_tensors(verb: str, tensors: Sequence[Any]) -> None:
    """Raise an ArgumentError unless all are dense tensors on one device that the group serves."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{verb}: expected tensors, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"{verb}: expected dense tensors, got one of layout {tensor.layout}; call "
                "tensor.to_dense() first"
            )
        if tensor.device.type not in DEVICES:
            raise ArgumentError(
                f"{verb}: expected tensors on {' or '.join(DEVICES)}, which this process group "
                f"serves, got one on {tensor.device}; call tensor.cpu() first"
            )
        if tensor.device != tensors[0].device:
            raise ArgumentError(
                f"{verb}: expected all tensors on one device, got some on {tensors[0].device} and "
                f"on {tensor.device}; move them to one of the two first"
            )


def check_count(verb: str, what: str, tensors: Sequence[object], size: int) -> None:
    """Raise an ArgumentError unless there is one tensor for each rank."""
    if len(tensors) != size:
        raise ArgumentError(
            f"{verb}: expected {what} with one tensor for each of {size} ranks, got {len(tensors)}"
        )


def check_rows(verb: str, tensor: torch.Tensor, rows: Sequence[int], size: int) -> None:
    """Raise an ArgumentError unless split sizes fit the tensor and the number of ranks."""
    if rows:
        check_count(verb, "split sizes", rows, size)
        fits = sum(rows) == (tensor.shape[0] if tensor.dim() else 1)
        if not fits:
            raise ArgumentError(
                f"{verb}: split sizes {list(rows)} add up to {sum(rows)}, but the tensor has shape "
                f"{tuple(tensor.shape)}"
            )
    elif tensor.numel() % size:
        raise ArgumentError(
            f"{verb}: expected a tensor that {size} ranks can share equally, or split sizes; got "
            f"shape {tuple(tensor.shape)}"
        )
