"""Lightning's collectives, made of asyncddp's: reduce, and all_gather with gradients."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from typing_extensions import override

from asyncddp.context import Context, current
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.allgather import allgather
from asyncddp.ops.allreduce import allreduce

_OPERATIONS = {
    "mean": "average", "avg": "average", "sum": "sum", "min": "min", "max": "max",
    "product": "product",
}  # fmt: skip


def logged_figure() -> str | None:
    """Return the name and time of the ``self.log`` value that is being reduced; None if none is.

    Lightning tells a strategy a tensor alone, and the figure of a step has the form of an epoch's:
    where ranks have unequal numbers of batches the one would be added to the other.
    """
    frame = inspect.currentframe()
    reducing = frame.f_back if frame else None  # the strategy's reduce()
    logging = reducing.f_back if reducing else None
    meta: Any = getattr(logging.f_locals.get("self"), "meta", None) if logging else None
    if logging is None or not hasattr(meta, "fx"):
        return None
    when = "a step" if logging.f_code.co_name == "update" else "an epoch"
    return f"{meta.name} of {when} in {meta.fx}"


def reduce_in_place(tensor: Any, group: Any, operation: Any, figure: str | None = None) -> Any:
    """Reduce a tensor over all ranks, in place; return anything else unchanged.

    Args:
        tensor: The tensor.
        group: None, since there is no group of torch.
        operation: ``"mean"``, ``"avg"``, ``"sum"``, a ``ReduceOp`` of torch, or None for the mean.
        figure: What it is, for messages; the same on all ranks.

    Raises:
        ArgumentError: A group was given, or the operation is another one.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    require_no_group("reduce", group)
    # torch's enumeration prints as RedOpType.SUM
    name = "mean" if operation is None else str(operation).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ArgumentError(
            f"reduce: argument reduce_op: expected one of {', '.join(_OPERATIONS)}, got "
            f"{operation!r}"
        )
    op, whole = _OPERATIONS[name], not tensor.is_floating_point() and not tensor.is_complex()
    if op == "average":
        summed = allreduce(tensor.detach().double() if whole else tensor.detach(), name=figure)
        return tensor.copy_(summed)
    value = tensor.detach().to(torch.int64) if whole else tensor.detach()
    return tensor.copy_(allreduce(value, op=op, name=figure))


def gather_stacked(tensor: torch.Tensor, group: Any, *, sync_grads: bool) -> torch.Tensor:
    """Gather a tensor of all ranks along a new first dimension, with gradients if asked for."""
    require_no_group("all_gather", group)
    if sync_grads and torch.is_grad_enabled():
        gathered: torch.Tensor = _StackedGather.apply(current(), tensor)  # type: ignore[no-untyped-call]
        return gathered
    return allgather(tensor.detach().unsqueeze(0))


def require_no_group(verb: str, group: Any) -> None:
    """Raise an ArgumentError for a torch process group of some ranks."""
    if group is not None and "WORLD" not in str(group):
        raise ArgumentError(
            f"{verb}: argument group: AsyncDDPStrategy works on all ranks; expected None, got "
            f"{group!r}. Use torch.distributed's verbs with a group of its own"
        )


class _StackedGather(torch.autograd.Function):
    """Autograd function that gathers tensors; its gradient sums all ranks' gradients."""

    @staticmethod
    @override
    def forward(ctx: Any, context: Context, tensor: torch.Tensor) -> torch.Tensor:
        ctx.context = context
        return allgather(tensor.detach().unsqueeze(0))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        with use(ctx.context):
            return None, allreduce(gradients[0].contiguous(), op="sum")[ctx.context.rank]
