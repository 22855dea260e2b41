"""The average of many tensors over all ranks, in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.memory.buckets import FlatBucket, partition
from asyncddp.ops.allreduce import allreduce_nonblocking

__all__ = ["average_tensors"]

_CAP = 32 << 20  # bytes that are averaged at a time


def average_tensors(tensors: Sequence[torch.Tensor]) -> None:
    r"""Replace tensors by their averages over ranks; collective.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_j x_j

    Args:
        tensors: Dense tensors of floats, alike on all ranks in number, shapes and dtypes. They are
            written through their ``data``, which leaves autograd's records alone.

    Raises:
        NotInitializedError: ``init()`` was not called.
        MismatchError: Ranks differ in shapes.

    Example:
        >>> import asyncddp as bf, torch
        >>> def mean():
        ...     x = torch.full((2,), float(bf.rank()))
        ...     average_tensors([x])
        ...     return x.tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(mean)
        [[0.5, 0.5], [0.5, 0.5]]
    """
    content = [tensor.data for tensor in tensors]
    under_way = []
    for indices in partition(content, _CAP):
        bucket = FlatBucket([content[index] for index in indices])
        for view, index in zip(bucket.views, indices, strict=True):
            view.copy_(content[index])
        under_way.append((bucket, indices, allreduce_nonblocking(bucket.flat)))
    for bucket, indices, handle in under_way:
        bucket.flat.copy_(handle.wait())
        for view, index in zip(bucket.views, indices, strict=True):
            content[index].copy_(view)
