"""Where the library's tensors come from, whatever torch is switched to around a call.

Every tensor that the library makes is made here or in :mod:`asyncddp.memory.shared`: as an ordinary
one also within ``torch.inference_mode``, of the dtype and on the device that are asked for whatever
torch's defaults are. Large ones on the host lie in memory that is used again, since fresh pages
cost more than averaging does: the C library gives every block above some 32 MB back to the system
as soon as it is free, and the system clears each page of the next one on its first touch. Of what
is free no more than half a gigabyte keeps its pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.memory.modes import normal_mode
from asyncddp.memory.private import PrivateArena

__all__ = ["copied", "empty", "empty_like", "values", "zeros", "zeros_like"]

_LARGE = 1 << 20  # bytes from which on it pays to use memory again
_HOST = torch.device("cpu")
_arena = PrivateArena(limit=1 << 29)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Make a contiguous tensor with whatever values its memory holds.

    Example:
        >>> with torch.inference_mode(), torch.device("meta"):
        ...     made = empty((2, 3), torch.float32)
        >>> made.device, made.is_inference()
        (device(type='cpu'), False)
    """
    shape = tuple(shape)
    if device.type == "cpu" and math.prod(shape) * dtype.itemsize >= _LARGE:
        return _arena.empty(shape, dtype)
    with normal_mode():
        return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the same shape, strides, dtype and device."""
    with normal_mode():
        return torch.empty_like(tensor)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Make a contiguous tensor of zeros."""
    with normal_mode():
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of zeros with the same shape, strides, dtype and device."""
    with normal_mode():
        return torch.zeros_like(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Make a copy, outside autograd."""
    with normal_mode():
        return tensor.detach().clone()


def values(numbers: Any, dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Make a tensor of numbers, or of lists of them."""
    with normal_mode():
        return torch.tensor(numbers, dtype=dtype, device=device)
