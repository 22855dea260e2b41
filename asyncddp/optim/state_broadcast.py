"""Broadcast of a root rank's optimizer state and options to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.broadcast import broadcast
from asyncddp.ops.named_tensors import require_equal_tensors
from asyncddp.ops.object_collectives import broadcast_object
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.tensors.allocation import empty


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder of a tensor in a pickled structure; the tensor itself is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


_RANK_LOCAL_KEYS = ("params", "param_names")
"""Keys of a parameter group that each rank keeps."""


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
    named = _named_parameters(optimizer)
    require_equal_tensors(current(), "broadcast_optimizer_state", named)
    own_value: Any = _collect_state(optimizer, named)
    tensors: list[torch.Tensor] = []
    root = current().rank == root_rank
    structure = broadcast_object(_extract_tensors(own_value, tensors) if root else None, root_rank)
    content = _receive_tensors(
        structure, own_value, iter(tensors) if root else None, root_rank, optimizer
    )
    if not root:
        _restore(optimizer, content, named)


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by group and by name, or else by index in the group."""
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            named[f"parameter {name} of group {number}"] = parameter
    return named


def _collect_state(
    optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Collect the options, state and counters to broadcast."""
    names = {id(parameter): name for name, parameter in named.items()}
    content: dict[str, Any] = {
        "options": [
            {key: value for key, value in group.items() if key not in _RANK_LOCAL_KEYS}
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


def _extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy a structure with placeholders for its tensors, which are appended to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorPlaceholder(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: _extract_tensors(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _rebuild_sequence(value, [_extract_tensors(entry, tensors) for entry in value])
    return value


def _receive_tensors(
    structure: Any, own_value: Any, sent: Any, root_rank: int, optimizer: Any
) -> Any:
    """Fill a structure with the root's tensors, received into this rank's own where they fit.

    Args:
        structure: The structure with placeholders, from :func:`_extract_tensors` on the root.
        own_value: This rank's value at the same position.
        sent: On the root an iterator over its tensors.
        root_rank: The root.
        optimizer: Its parameters' device is that of new tensors.
    """
    if isinstance(structure, _TensorPlaceholder):
        target = next(sent) if sent is not None else _target_tensor(structure, own_value, optimizer)
        with torch.no_grad():
            return broadcast(target, root_rank, out=target)
    if isinstance(structure, dict):
        own = own_value if isinstance(own_value, dict) else {}
        return {
            key: _receive_tensors(entry, own.get(key), sent, root_rank, optimizer)
            for key, entry in structure.items()
        }
    if isinstance(structure, (list, tuple)):
        known = list(own_value) if isinstance(own_value, (list, tuple)) else []
        known += [None] * (len(structure) - len(known))
        parts = [
            _receive_tensors(entry, own, sent, root_rank, optimizer)
            for entry, own in zip(structure, known, strict=False)
        ]
        return _rebuild_sequence(structure, parts)
    return structure


def _target_tensor(
    placeholder: _TensorPlaceholder, own_value: Any, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    fits = (
        isinstance(own_value, torch.Tensor)
        and tuple(own_value.shape) == placeholder.shape
        and own_value.dtype == placeholder.dtype
    )
    if fits:
        kept: torch.Tensor = own_value
        return kept
    device = (
        torch.device("cpu")
        if placeholder.on_host
        else optimizer.param_groups[0]["params"][0].device
    )
    return empty(placeholder.shape, placeholder.dtype, device)


def _rebuild_sequence(model: Any, parts: list[Any]) -> Any:
    """Build a list or tuple of the type of ``model``, including named tuples."""
    return type(model)(*parts) if hasattr(model, "_fields") else type(model)(parts)
