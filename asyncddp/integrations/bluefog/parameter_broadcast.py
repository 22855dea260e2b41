"""BlueFog's functions that make parameters, optimizer state or objects equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.integrations.bluefog.verb_variants import unless_suspended
from asyncddp.ops import object_collectives as _objects
from asyncddp.optim import parameter_sync as _parameters
from asyncddp.optim import state_broadcast as _state

__all__ = [
    "allreduce_parameters",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


@unless_suspended
def broadcast_parameters(params: _parameters.Parameters, root_rank: int) -> None:
    """Give all ranks the root's parameters, in place; see :func:`asyncddp.broadcast_parameters`."""
    _parameters.broadcast_parameters(params, root_rank)


@unless_suspended
def allreduce_parameters(params: _parameters.Parameters) -> None:
    """Average parameters over all ranks, in place; see :func:`asyncddp.allreduce_parameters`."""
    _parameters.allreduce_parameters(params)


@unless_suspended
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all ranks the root's optimizer state; see :func:`asyncddp.broadcast_optimizer_state`."""
    _state.broadcast_optimizer_state(optimizer, root_rank)


@unless_suspended
def broadcast_object(
    obj: Any, src: int = 0, device: torch.device | str | None = None, name: str | None = None
) -> Any:
    """Give all ranks the object of the root ``src``, by pickle; ``device`` means nothing here."""
    del device
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
