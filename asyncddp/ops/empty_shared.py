"""``empty_shared``: allocates a tensor in memory shared by the ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import current
from asyncddp.tensors.allocation import empty


def empty_shared(shape: Sequence[int] | int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate a CPU tensor in memory shared by the ranks of this machine.

    Neighbours on this machine read such a tensor in place, so that averaging it costs little more
    than the arithmetic; the optimizers' flat buckets are allocated there too. In all other respects
    it is a normal tensor. If memory cannot be shared, an ordinary tensor is returned.

    Returns:
        A contiguous CPU tensor with arbitrary values.

    Raises:
        NotInitializedError: ``init()`` was not called.

    Example:
        >>> import asyncddp as bf, torch
        >>> bf.init()
        >>> bf.empty_shared((2, 3)).fill_(1.0).sum()
        tensor(6.)
        >>> bf.shutdown()
    """
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    group = current().transport.shared_memory_group
    return empty(size, dtype) if group is None else group.arena.empty(size, dtype)
