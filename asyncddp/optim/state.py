"""The root's optimizer state for all ranks: options and state, without a single step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.memory.allocate import empty
from asyncddp.ops.broadcast import broadcast
from asyncddp.ops.named_tensors import agree_on_tensors
from asyncddp.ops.objects import broadcast_object
from asyncddp.optim.optimizer import DistributedOptimizer

__all__ = ["broadcast_optimizer_state"]


@dataclass(frozen=True)
class _Place:
    """Where a tensor was, in a structure that travels without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


_OWN = ("params", "param_names")
"""What a group keeps of its own."""


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the root's optimizer state and options.

    Works for any optimizer, with whatever nesting, tensors, numbers and None it keeps; numbers
    arrive exactly. No step is made and no parameter moves. State that the root does not have is
    dropped. Of a :class:`DistributedOptimizer` the counters are taken along. Parameters match by
    name where the optimizer was made of ``model.named_parameters()``, by their place in the group
    otherwise.

    Args:
        optimizer: The optimizer, with the same parameters in the same groups on all ranks.
        root_rank: The root.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: It is no optimizer, or there is no such root.
        MismatchError: Ranks differ in groups, or in names, shapes or dtypes of parameters; raised
            on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def start():
        ...     weight = torch.zeros(1, requires_grad=True)
        ...     optimizer = torch.optim.SGD([weight], lr=0.1 * (1 + bf.rank()))
        ...     bf.broadcast_optimizer_state(optimizer)
        ...     return optimizer.param_groups[0]["lr"]
        >>> with bf.local_world(2) as world:
        ...     world.run(start)
        [0.1, 0.1]
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "broadcast_optimizer_state: argument optimizer: expected a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    named = _named(optimizer)
    agree_on_tensors(current(), "broadcast_optimizer_state", named)
    mine: Any = _content(optimizer, named)
    tensors: list[torch.Tensor] = []
    root = current().rank == root_rank
    frame = broadcast_object(_frame(mine, tensors) if root else None, root_rank)
    content = _filled(frame, mine, iter(tensors) if root else None, root_rank, optimizer)
    if not root:
        _restore(optimizer, content, named)


def _named(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Its parameters, by group and by the name, or else the place, that they have in it."""
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            named[f"parameter {name} of group {number}"] = parameter
    return named


def _content(optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> dict[str, Any]:
    """All that is to travel."""
    names = {id(parameter): name for name, parameter in named.items()}
    content: dict[str, Any] = {
        "options": [
            {key: value for key, value in group.items() if key not in _OWN}
            for group in optimizer.param_groups
        ],
        "state": {
            (id(key) in names, names.get(id(key), key)): value
            for key, value in optimizer.state.items()
        },
    }
    if isinstance(optimizer, DistributedOptimizer):
        content["counters"] = optimizer.counters
    return content


def _restore(
    optimizer: torch.optim.Optimizer, content: dict[str, Any], named: dict[str, torch.Tensor]
) -> None:
    for group, options in zip(optimizer.param_groups, content["options"], strict=True):
        group.update(options)
    optimizer.state.clear()
    for (known, key), value in content["state"].items():
        optimizer.state[named[key] if known else key] = value
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.counters = content["counters"]


def _frame(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with places for its tensors, which are listed in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: _frame(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _like(value, [_frame(entry, tensors) for entry in value])
    return value


def _filled(frame: Any, mine: Any, sent: Any, root_rank: int, optimizer: Any) -> Any:
    """The structure with the root's tensors, into this rank's own where they fit.

    Args:
        frame: What :func:`_frame` gave on the root.
        mine: What this rank has in that place.
        sent: On the root an iterator over its tensors.
        root_rank: The root.
        optimizer: Its parameters say on which device new tensors lie.
    """
    if isinstance(frame, _Place):
        target = next(sent) if sent is not None else _room(frame, mine, optimizer)
        with torch.no_grad():
            return broadcast(target, root_rank, out=target)
    if isinstance(frame, dict):
        own = mine if isinstance(mine, dict) else {}
        return {
            key: _filled(entry, own.get(key), sent, root_rank, optimizer)
            for key, entry in frame.items()
        }
    if isinstance(frame, (list, tuple)):
        known = list(mine) if isinstance(mine, (list, tuple)) else []
        known += [None] * (len(frame) - len(known))
        parts = [
            _filled(entry, own, sent, root_rank, optimizer)
            for entry, own in zip(frame, known, strict=False)
        ]
        return _like(frame, parts)
    return frame


def _room(place: _Place, mine: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    fits = (
        isinstance(mine, torch.Tensor)
        and tuple(mine.shape) == place.shape
        and mine.dtype == place.dtype
    )
    if fits:
        kept: torch.Tensor = mine
        return kept
    device = torch.device("cpu") if place.on_host else optimizer.param_groups[0]["params"][0].device
    return empty(place.shape, place.dtype, device)


def _like(model: Any, parts: list[Any]) -> Any:
    """A list or tuple, named ones included, of the kind of ``model``."""
    return type(model)(*parts) if hasattr(model, "_fields") else type(model)(parts)
