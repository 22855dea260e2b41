"""``empty_shared``: allocate a tensor in memory shared by the ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import current
from asyncddp.tensors.allocation import empty


def empty_shared(shape: Sequence[int] | int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor on the host in memory that the ranks of this machine share.

    Neighbours on this machine read such a tensor where it lies, so that averaging it costs little
    more than the arithmetic; the flat buckets of the optimizers live there too. To everybody else
    it is a tensor like any other. Where memory cannot be shared it is an ordinary one.

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
