"""Synchronisation of parameters over all ranks: broadcast from a root, or average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce_nonblocking_
from asyncddp.ops.allreduce_tensors import broadcast_tensors
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of

Parameters: TypeAlias = (
    torch.nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
)


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    r"""Give all ranks the root's parameters, in place.

    .. math:: x_i \leftarrow x_\mathrm{root}

    Args:
        params: A module (its parameters and buffers), a ``state_dict()``, a list of tensors, or
            names with tensors such as ``model.named_parameters()``. Ranks match by name, in
            whatever order they list them; tensors without names match by their place.
        root_rank: The root.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor, or no such root.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def start():
        ...     weight = torch.full((2,), float(bf.rank()))
        ...     bf.broadcast_parameters({"weight": weight}, root_rank=1)
        ...     return weight.tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(start)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    named = _named("broadcast_parameters", params)
    require_equal_tensors(current(), "broadcast_parameters", named)
    tensors = list(named.values())
    wait_for_reads(tensors)
    broadcast_tensors(tensors, root_rank)


def allreduce_parameters(params: Parameters, *, round_integers: bool = False) -> None:
    r"""Replace parameters by their averages over all ranks, in place.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_j x_j

    Args:
        params: As for :func:`broadcast_parameters`.
        round_integers: Average integers too, rounded half to even; they stay as they are otherwise,
            and bools always do.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def mean():
        ...     weight = torch.full((2,), float(bf.rank()))
        ...     bf.allreduce_parameters([weight])
        ...     return weight.tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(mean)
        [[0.5, 0.5], [0.5, 0.5]]
    """
    named = _named("allreduce_parameters", params)
    require_equal_tensors(current(), "allreduce_parameters", named)
    tensors = [one for one in named.values() if one.is_floating_point() or one.is_complex()]
    if round_integers:
        tensors = [one for one in named.values() if one.dtype != torch.bool]
    wait_for_reads(tensors)
    for handle in [allreduce_nonblocking_(t, round_integers=round_integers) for t in tensors]:
        handle.wait()


def _named(caller: str, params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name, each once, in an order that is equal on all ranks."""
    if isinstance(params, torch.nn.Module):
        return tensors_of(params)
    entries = params.items() if isinstance(params, Mapping) else params
    if not isinstance(entries, Iterable) or isinstance(entries, torch.Tensor):
        raise ArgumentError(
            f"{caller}: argument params: expected a module, a state_dict, tensors or (name, "
            f"tensor) pairs, got {type(params).__name__}"
        )
    named: dict[str, torch.Tensor] = {}
    unnamed: dict[str, torch.Tensor] = {}
    for index, entry in enumerate(entries):
        pair = isinstance(entry, tuple) and len(entry) == 2
        name, tensor = entry if pair else (f"tensor {index}", entry)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"{caller}: argument params: expected a tensor as entry {name if pair else index}, "
                f"got {type(tensor).__name__}"
            )
        if named.get(name, tensor) is not tensor:
            raise ArgumentError(
                f"{caller}: argument params: two tensors have the name {name}; give each its own"
            )
        (named if pair else unnamed)[name] = tensor
    once: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*sorted(named.items(), key=lambda one: str(one[0])), *unnamed.items()):
        once.setdefault(id(tensor), (str(name), tensor))
    return dict(once.values())
