"""Check for ordinary tensors, which hold their values in their own memory (no ``DTensor``)."""

from __future__ import annotations

import torch

from asyncddp.errors import ArgumentError

_DISPATCH = torch.Tensor.__torch_dispatch__


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds its values in its own memory, unlike a ``DTensor``.

    Example:
        >>> rows = [torch.ones(2), torch.ones(3)]
        >>> ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        >>> is_ordinary(torch.ones(2)), is_ordinary(ragged)
        (True, False)
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _DISPATCH:  # on a device torch computes, whatever the class
        return not tensor.is_cpu and not hasattr(kind, "__tensor_flatten__")
    return not tensor.is_nested


def require_ordinary(verb: str, tensor: torch.Tensor, argument: str) -> None:
    """Raise an ArgumentError unless a tensor holds its values in its own memory."""
    if is_ordinary(tensor):
        return
    kind = "a nested tensor" if tensor.is_nested else f"a {type(tensor).__name__}"
    if tensor.is_nested:
        remedy = "pass the tensors of tensor.unbind() as a list, or tensor.to_padded_tensor(0.0)"
    elif hasattr(tensor, "to_local"):
        remedy = "pass tensor.to_local(), this rank's part of it"
    else:
        remedy = "pass the tensors that it is made of"
    raise ArgumentError(
        f"{verb}: argument {argument}: expected a tensor whose values lie in its own memory, got "
        f"{kind}; {remedy}"
    )
