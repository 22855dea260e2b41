"""Equal parameters on all ranks: the root's, or the average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from asyncddp.algorithms.owners import settle
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce_nonblocking_
from asyncddp.ops.broadcast import broadcast_nonblocking_

__all__ = ["Parameters", "allreduce_parameters", "broadcast_parameters"]

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
            names with tensors such as ``model.named_parameters()``; alike on all ranks.
        root_rank: The root.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor, or no such root.
        MismatchError: Ranks differ in number, shape or dtype.

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
    tensors = _listed("broadcast_parameters", params)
    settle(tensors)
    for handle in [broadcast_nonblocking_(tensor, root_rank) for tensor in tensors]:
        handle.wait()


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
        MismatchError: Ranks differ in number, shape or dtype.

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
    tensors = [
        tensor
        for tensor in _listed("allreduce_parameters", params)
        if tensor.is_floating_point()
        or tensor.is_complex()
        or (round_integers and tensor.dtype != torch.bool)
    ]
    settle(tensors)
    handles = [allreduce_nonblocking_(t, round_integers=round_integers) for t in tensors]
    for handle in handles:
        handle.wait()


def _listed(caller: str, params: Any) -> list[torch.Tensor]:
    """The tensors in an order that is equal on all ranks, each once."""
    if isinstance(params, torch.nn.Module):
        params = [*params.parameters(), *params.buffers()]
    elif isinstance(params, Mapping):
        params = sorted(params.items())
    if not isinstance(params, Iterable) or isinstance(params, torch.Tensor):
        raise ArgumentError(
            f"{caller}: argument params: expected a module, a state_dict, tensors or (name, "
            f"tensor) pairs, got {type(params).__name__}"
        )
    tensors: dict[int, torch.Tensor] = {}
    for place, entry in enumerate(params):
        named = isinstance(entry, tuple) and len(entry) == 2
        name, tensor = entry if named else (place, entry)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"{caller}: argument params: expected a tensor as entry {name}, got "
                f"{type(tensor).__name__}"
            )
        tensors[id(tensor)] = tensor
    return list(tensors.values())
