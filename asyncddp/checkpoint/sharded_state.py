"""Separation of per-parameter tensors from a training state, to save them as shards.

A sharded replica's checkpoint has them in files that can be read in other parts, and the rest of
the state in a file of its own, in which a tensor on torch's ``meta`` device has their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from asyncddp.checkpoint.training_state import METHOD_KEYS
from asyncddp.errors import ArgumentError
from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel
from asyncddp.tensors.allocation import empty, zeros_like
from asyncddp.tensors.local_parts import (
    fitted,
    is_distributed,
    like_parameter,
    local,
    shard,
)

Path: TypeAlias = tuple[Any, ...]
_META = torch.device("meta")


class ParameterState:
    """Tensors of a training state that belong to parameters, by their paths in that state.

    Args:
        model: The model; its tensors are found by name.
        optimizer: Its optimizer, whose state names parameters by place; None if there is none, or
            if it is the model's wrapper's, whose state names them.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._optimized: dict[Any, torch.Tensor] = {}
        if optimizer is not None:
            groups = optimizer.param_groups
            self._optimized = dict(enumerate(one for group in groups for one in group["params"]))
        elif isinstance(model, DecentralizedDataParallel):
            self._optimized = dict(model._reducer.named_parameters)

    @property
    def forms(self) -> list[str]:
        """Names and shapes of the model's tensors, which all ranks of all replicas share."""
        every = self._tensors.items()
        return [f"{name} of shape {tuple(t.shape)}" for name, t in every if torch.is_tensor(t)]

    def check(self, verb: str, state: Mapping[str, Any]) -> None:
        """Raise an error if a parameter is a DTensor, and an optimizer's state of it is not."""
        for path, value, owner in self._find(state):
            sharded = path[1] == "state" and owner is not None and is_distributed(owner)
            if sharded and value.dim() and not is_distributed(value):
                raise ArgumentError(
                    f"{verb}: argument optimizer: expected {path[-1]} of parameter {path[-2]} as a "
                    f"DTensor like the parameter, or as a number, got a tensor of shape "
                    f"{tuple(value.shape)}; make it by torch.zeros_like(parameter)"
                )

    def take_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the tensors in a state by ``meta`` ones; return them in nested dicts."""
        found: dict[str, Any] = {}
        for path, value, owner in list(self._find(state)):
            whole = None if owner is None else _as_whole(path, value, owner)
            if whole is not None:
                _put(found, path, whole)
                _put(state, path, empty(whole.shape, whole.dtype, _META))
        return found

    def put_back(self, state: dict[str, Any], read: Callable[[dict[str, Any]], None]) -> None:
        """Replace ``meta`` tensors in a state by those that are read into nested dicts."""
        wanted, nested = [], dict[str, Any]()
        for path, value, owner in self._find(state):
            if value.is_meta and owner is not None:
                like = like_parameter(owner, value.shape, value.dtype)
                wanted.append((path, like, owner))
                _put(nested, path, wanted[-1][1])
        read(nested)
        for path, whole, owner in wanted:
            _put(state, path, _padded(whole, owner) if _of_method(path) else whole)

    def _find(
        self, state: Mapping[str, Any]
    ) -> Iterator[tuple[Path, torch.Tensor, torch.Tensor | None]]:
        """Yield paths, tensors, and the parameters to which they belong, if they are known."""
        optimizer = state.get("optimizer", {})
        owners: Mapping[str, torch.Tensor | None]
        tables: list[tuple[Path, Mapping[str, Any], Mapping[str, torch.Tensor | None]]]
        tables = [(("model",), state["model"], self._tensors)]
        for key, kept in optimizer.get("state", {}).items():
            owners = dict.fromkeys(kept, self._optimized.get(key))
            tables.append((("optimizer", "state", key), kept, owners))
        for method in METHOD_KEYS:
            averaging = optimizer.get(method)
            every = averaging.get("parameters", {}) if isinstance(averaging, Mapping) else {}
            for name, kept in every.items():
                owners = dict.fromkeys(kept, self._tensors.get(name))
                tables.append((("optimizer", method, "parameters", name), kept, owners))
        for path, kept, owners in tables:
            for key, value in kept.items():
                if isinstance(value, torch.Tensor):
                    yield (*path, key), value, owners.get(key)


def without_own_parts(verb: str, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without the residuals of compressors, which fit equal parts only.

    Raises:
        ArgumentError: The method keeps other tensors that cannot be divided anew.
    """
    found = dict(optimizer)
    for method in METHOD_KEYS:
        averaging = found.get(method)
        if not isinstance(averaging, Mapping):
            continue
        for name, kept in averaging.get("parameters", {}).items():
            undivided = [key for key, value in kept.items() if value.dim() and not value.is_meta]
            if undivided:
                raise ArgumentError(
                    f"{verb}: argument mesh: expected replicas that are sharded as they were, "
                    f"since {averaging['algorithm']} keeps {undivided[0]} of {name} by parts, got "
                    "others; take replicas='average', from which the method begins anew"
                )
        found[method] = {**averaging, "compressors": []}
    return found


def _put(tree: dict[str, Any], path: Path, value: torch.Tensor) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _of_method(path: Path) -> bool:
    return path[0] == "optimizer" and path[1] in METHOD_KEYS


def _as_whole(path: Path, value: torch.Tensor, owner: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that torch can divide anew; None for one that stays where it is."""
    if path[0] == "model":
        return value if isinstance(owner, torch.nn.Parameter) or is_distributed(value) else None
    if not _of_method(path):
        return value if value.dim() or is_distributed(value) else None
    if not is_distributed(owner) or value.shape != local(owner).shape:
        return value if value.dim() and value.shape == owner.shape else None
    whole = zeros_like(owner, value.dtype)
    shard(whole).copy_(fitted(value, shard(whole)))
    return whole


def _padded(whole: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor like a parameter, as a bucket holds it."""
    if not is_distributed(owner):
        return whole
    part, padded = shard(whole), zeros_like(local(owner), whole.dtype)
    fitted(padded, part).copy_(part)
    return padded
