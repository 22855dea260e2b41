"""Allocation of asyncddp's own tensors, independent of torch's modes and defaults.

Every tensor that the library makes is made here or in :mod:`asyncddp.shm.arena`: an ordinary one
also within ``torch.inference_mode``, with the requested dtype and device whatever torch's defaults
are. Large ones on the host lie in memory that is reused, since fresh pages cost more than averaging
does: the C library gives every block above some 32 MB back to the system as soon as it is free, and
the system clears each page of the next one on its first touch. No more than half a gigabyte of free
memory keeps its pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from asyncddp.shm.arena import InProcessArena
from asyncddp.torch_modes import normal_mode

_LARGE = 1 << 20  # bytes from which on it pays to reuse memory
_HOST = torch.device("cpu")
_arena = InProcessArena(limit=1 << 29)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Allocate a contiguous, uninitialised tensor; large CPU tensors reuse memory.

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
    """Allocate an uninitialised tensor of the same shape, strides, dtype and device."""
    with normal_mode():
        return torch.empty_like(tensor)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Allocate a contiguous tensor of zeros."""
    with normal_mode():
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate zeros of the same shape, strides and device, and the same dtype unless given."""
    with normal_mode():
        return torch.zeros_like(tensor, dtype=dtype)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, outside autograd."""
    with normal_mode():
        return tensor.detach().clone()


def make_tensor(numbers: Any, dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Make a tensor from numbers or nested lists of them, as ``torch.tensor`` does."""
    with normal_mode():
        return torch.tensor(numbers, dtype=dtype, device=device)


def arange(count: int, dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
    """Make a tensor of the numbers from 0 to ``count`` - 1."""
    with normal_mode():
        return torch.arange(count, dtype=dtype, device=device)


class TensorBackup:
    """Backup of tensors: copies them on construction, and restores them later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._copies = [(tensor, detached_copy(tensor)) for tensor in tensors]

    def restore(self) -> None:
        """Write the copies back through ``data``, unnoticed by autograd."""
        for tensor, own in self._copies:
            tensor.data.copy_(own)
