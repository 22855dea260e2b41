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
    """Give all ranks the root's parameters, in place.

    Args:
        params: A ``state_dict()``, a list of tensors, names with tensors, or a module.
        root_rank: The root.
    """
    _parameters.broadcast_parameters(params, root_rank)


@unless_suspended
def allreduce_parameters(params: _parameters.Parameters) -> None:
    """Replace parameters by their averages over all ranks, in place; integers stay as they are.

    Args:
        params: As for :func:`broadcast_parameters`.
    """
    _parameters.allreduce_parameters(params)


@unless_suspended
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all ranks the root's optimizer state and options, exactly and without a step.

    Args:
        optimizer: The optimizer, with the same parameters in the same groups on all ranks.
        root_rank: The root.
    """
    _state.broadcast_optimizer_state(optimizer, root_rank)


@unless_suspended
def broadcast_object(
    obj: Any, src: int = 0, device: torch.device | str | None = None, name: str | None = None
) -> Any:
    """Give all ranks the root's object, by pickle.

    Args:
        obj: The object; only the root's counts.
        src: The root.
        device: Means nothing here: objects travel through host memory.
        name: For messages; all ranks must give the same.
    """
    del device
    return _objects.broadcast_object(obj, src, name=name)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> None:
    """Replace the objects of a list by the root's, by pickle.

    Args:
        object_list: Equally long on all ranks.
        src: The root; 0 if None.
        device: Means nothing here: objects travel through host memory.
        name: For messages; all ranks must give the same.
    """
    if object_list:
        object_list[:] = broadcast_object(object_list, 0 if src is None else src, device, name)
