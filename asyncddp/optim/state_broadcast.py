"""Broadcast of a root rank's optimizer state and options to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import KeyPath, tree_flatten_with_path, tree_map, tree_map_with_path

from asyncddp.context import current
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context
from asyncddp.errors import ArgumentError
from asyncddp.ops.broadcast import broadcast
from asyncddp.ops.object_collectives import broadcast_object
from asyncddp.ops.settings_agreement import require_equal_tensors
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.local_parts import is_distributed, like_parameter, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder for a tensor in a pickled structure; the tensor is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    distributed: bool


_RANK_LOCAL_KEYS = ("params", "param_names")
"""Keys of a parameter group that each rank keeps."""


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, mesh: DeviceMesh | None = None
) -> None:
    """Broadcast the root's optimizer state and options to all ranks.

    Works for any optimizer, with whatever nesting, tensors, numbers and None it keeps; numbers
    arrive exactly. No step is made and no parameter moves. State that the root does not have is
    dropped. Of a :class:`DistributedOptimizer` the counters are taken along. Parameters match by
    name where the optimizer was made of ``model.named_parameters()``, by their place in the group
    otherwise.

    Args:
        optimizer: The optimizer, with the same parameters in the same groups on all ranks.
        root_rank: The root.
        mesh: Where parameters are sharded: the dimension of the mesh whose ranks are replicas, of
            which the root is one. Each rank receives its parts.

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
    with use(replica_context(mesh)):
        require_equal_tensors(current(), "broadcast_optimizer_state", named)
        own_value: Any = _collect_state(optimizer, named)
        root = current().rank == root_rank
        structure = broadcast_object(tree_map(_placeholder, own_value) if root else None, root_rank)
        content = _receive_tensors(structure, own_value, root_rank, named)
    if root:
        return
    for group, options in zip(optimizer.param_groups, content["options"], strict=True):
        group.update(options)
    optimizer.state.clear()
    for (known, key), value in content["state"].items():
        optimizer.state[named[key] if known else key] = value
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.counters = content["counters"]


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by group and name, or by index without names."""
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            named[f"parameter {name} of group {number}"] = parameter
    return named


def _collect_state(
    optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in named.items()}
    groups, state = optimizer.param_groups, optimizer.state
    content: dict[str, Any] = {
        "options": [{k: v for k, v in one.items() if k not in _RANK_LOCAL_KEYS} for one in groups],
        "state": {(id(k) in names, names.get(id(k), k)): v for k, v in state.items()},
    }
    if isinstance(optimizer, DistributedOptimizer):
        content["counters"] = optimizer.counters
    return content


def _placeholder(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    on_host = value.device.type == "cpu"
    return _TensorPlaceholder(tuple(value.shape), value.dtype, on_host, is_distributed(value))


def _receive_tensors(
    structure: Any, own_value: Any, root_rank: int, named: dict[str, torch.Tensor]
) -> Any:
    """Fill a structure with the root's tensors, reusing this rank's tensors if they fit."""
    own = dict(tree_flatten_with_path(own_value)[0])

    def receive(path: KeyPath, entry: Any) -> Any:
        if not isinstance(entry, _TensorPlaceholder):
            return entry
        target = own.get(path)
        form = entry.shape, entry.dtype
        if not isinstance(target, torch.Tensor) or (tuple(target.shape), target.dtype) != form:
            target = _empty(entry, path, named)
        with torch.no_grad():
            broadcast(shard(target), root_rank, out=shard(target))
        return target

    return tree_map_with_path(receive, structure)


def _empty(
    entry: _TensorPlaceholder, path: KeyPath, named: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Allocate a tensor like the root's, sharded as the parameter is to which it belongs."""
    if entry.distributed:
        key: Any = path[1]
        return like_parameter(named[key.key[1]], entry.shape, entry.dtype)
    device = torch.device("cpu") if entry.on_host else next(iter(named.values())).device
    return empty(entry.shape, entry.dtype, device)
