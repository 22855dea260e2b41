"""BlueFog's operations among all ranks, on tensors, parameters, optimizer state and objects."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.context import current
from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.error_translation import IntegerAverageError
from asyncddp.integrations.bluefog.verb_variants import (
    Options,
    blocking,
    in_place,
    nonblocking,
    unless_suspended,
)
from asyncddp.ops import allgather as _allgather
from asyncddp.ops import allreduce as _allreduce
from asyncddp.ops import barrier as _barrier
from asyncddp.ops import broadcast as _broadcast
from asyncddp.ops import object_collectives as _objects
from asyncddp.optim import parameter_sync as _parameters
from asyncddp.optim import state_broadcast as _state

__all__ = [
    "allgather", "allgather_nonblocking", "allreduce", "allreduce_", "allreduce_nonblocking",
    "allreduce_nonblocking_", "allreduce_parameters", "barrier", "broadcast", "broadcast_",
    "broadcast_nonblocking", "broadcast_nonblocking_", "broadcast_object", "broadcast_object_list",
    "broadcast_optimizer_state", "broadcast_parameters",
]  # fmt: skip


def _run_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> torch.Tensor:
    return (_allreduce.local_allreduce if local else _allreduce.allreduce)(tensor, **options)


def _start_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> Handle[torch.Tensor]:
    start = _allreduce.local_allreduce_nonblocking if local else _allreduce.allreduce_nonblocking
    return start(tensor, **options)


@blocking(_run_allreduce, _start_allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Options:
    """Average or sum a tensor over all ranks; see :func:`asyncddp.allreduce`.

    With ``is_hierarchical_local`` among the ranks of this machine alone.
    """
    may_average = not isinstance(tensor, torch.Tensor) or tensor.is_floating_point()
    if average and not may_average and not tensor.is_complex():
        raise IntegerAverageError(
            f"allreduce: argument average: expected False for {tensor.dtype}, whose average is "
            "none; or cast the tensor to float first"
        )
    local = is_hierarchical_local
    return {"tensor": tensor, "average": average, "local": local, "name": name}


@blocking(_broadcast.broadcast, _broadcast.broadcast_nonblocking)
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Options:
    """Give all ranks the root's tensor, as a new one; see :func:`asyncddp.broadcast`."""
    return {"tensor": tensor, "root_rank": root_rank, "name": name}


@blocking(_allgather.allgather, _allgather.allgather_nonblocking)
def allgather(tensor: torch.Tensor, name: str | None = None) -> Options:
    """Concatenate all ranks' tensors along the first dimension; see :func:`asyncddp.allgather`."""
    return {"tensor": tensor, "name": name}


allreduce_ = in_place(allreduce)
allreduce_nonblocking = nonblocking(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
broadcast_ = in_place(broadcast)
broadcast_nonblocking = nonblocking(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
allgather_nonblocking = nonblocking(allgather)


@unless_suspended
def barrier() -> None:
    """Wait until all ranks have called this; other operations stay under way.

    What was noted in a timeline before is in its file afterwards.
    """
    _barrier.barrier()
    tracer = current().tracer
    if tracer is not None:
        tracer.flush()


@unless_suspended
def broadcast_parameters(params: _parameters.Parameters, root_rank: int) -> None:
    """Give all ranks the root's parameters, in place; see :func:`asyncddp.broadcast_parameters`."""
    _parameters.broadcast_parameters(params, root_rank)


allreduce_parameters = unless_suspended(_parameters.allreduce_parameters)


@unless_suspended
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all ranks the root's optimizer state; see :func:`asyncddp.broadcast_optimizer_state`."""
    _state.broadcast_optimizer_state(optimizer, root_rank)


@unless_suspended
def broadcast_object(
    obj: Any, src: int = 0, device: torch.device | str | None = None, name: str | None = None
) -> Any:
    """Give all ranks the object of the root ``src``, by pickle; ``device`` means nothing here."""
    return _objects.broadcast_object(obj, src, name=name)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> None:
    """Replace the objects of a list by the root's, which is rank 0 if ``src`` is None."""
    if object_list:
        object_list[:] = broadcast_object(object_list, 0 if src is None else src, device, name)
