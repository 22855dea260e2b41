"""Local parts of parameters: this rank's memory of a DTensor, which buckets hold.

Of an ordinary tensor that is the tensor itself. Of a parameter of FSDP2 it is the shard with its
padding, so that all ranks of a mesh have buckets of equal sizes; the padding is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from asyncddp.tensors.allocation import zeros, zeros_like
from asyncddp.tensors.fsdp_params import (
    fsdp_modules,
    move_shard,
    padded_shard,
    shard_of,
    stays_in_place,
)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this rank has a part."""
    return shard_of(tensor) is not None


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what a bucket holds of a parameter, in its own memory, without autograd.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> local(weight).data_ptr() == weight.data_ptr(), local(weight).requires_grad
        (True, False)
    """
    return held(parameter).data


def held(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose values :func:`local` shows."""
    found = shard_of(parameter)
    if found is None:
        return parameter
    padded = padded_shard(parameter)
    return found if padded is None else padded


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's local part without padding; an ordinary tensor itself."""
    found = shard_of(tensor)
    return tensor if found is None else found.detach()


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the local part of a parameter's gradient, without padding, or None."""
    return None if parameter.grad is None else shard(parameter.grad)


def set_local(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Let a parameter hold its values in a view of :func:`local`'s shape."""
    found = shard_of(parameter)
    if found is None:
        parameter.data = view
    else:
        move_shard(parameter, view, fitted(view, found))


def is_movable(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can hold its values in a bucket, or is copied there and back."""
    return not stays_in_place(parameter)


def fitted(view: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the part of a padded view that a tensor without padding fills.

    A view of the models of several ranks, which has one dimension more, is filled whole.

    Example:
        >>> fitted(torch.zeros(3, 2), torch.zeros(1, 2)).shape
        torch.Size([1, 2])
    """
    if view.shape == part.shape or view.dim() != part.dim():
        return view
    for dimension, (padded, used) in enumerate(zip(view.shape, part.shape, strict=True)):
        if padded != used:
            view = view.narrow(dimension, 0, used)
    return view


def like_parameter(owner: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make zeros of a shape, divided as a parameter is, if it has that shape; else whole."""
    if tuple(shape) == owner.shape:
        return zeros_like(owner, dtype)
    whole = zeros(tuple(shape), dtype, owner.device)
    if not is_distributed(owner):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = owner.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free what FSDP2 has gathered, so that modules have their sharded parameters again."""
    for module in fsdp_modules(modules):
        module.reshard()  # type: ignore[operator]
