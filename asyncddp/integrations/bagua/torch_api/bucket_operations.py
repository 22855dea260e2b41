"""Bucket operations that call asyncddp's collectives: sums and averages over a group's ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from asyncddp.compression import Compressor, compressor_for
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup, group_or_default
from asyncddp.ops.allgather import allgather
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_allreduce import hierarchical_allreduce_nonblocking
from asyncddp.ops.reduce_scatter import reduce_scatter_nonblocking
from asyncddp.tensors.allocation import zeros

_NAMES = {"MinMaxUInt8": "minmax_uint8"}
"""Bagua's names of compressors."""


class OperatedBucket(Protocol):
    """Interface of a bucket of tensors, as bucket operations use it."""

    name: str
    label: str

    def gather(self) -> torch.Tensor:
        """Return a flat tensor with the current values."""

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy a flat tensor back into the bucket's tensors."""


Finish: TypeAlias = Callable[[], None]
BucketOperation: TypeAlias = Callable[[OperatedBucket], Finish | None]
"""Function that starts an operation on a ready bucket, and returns a function that finishes it.

The result is None if the operation is already complete.
"""


def compressor_by_name(caller: str, name: str | Compressor | None) -> Compressor | None:
    """Return a compressor, which may be given by Bagua's name or the library's; None for None."""
    if name is None:
        return None
    return compressor_for(caller, _NAMES.get(name, name) if isinstance(name, str) else name)


def among(
    group: BaguaProcessGroup | None, start: Callable[[Context, OperatedBucket], Finish]
) -> BucketOperation:
    """Make an operation that runs on the ranks of a group, and does nothing on other ranks."""
    context = group_or_default(group).context

    def operation(bucket: OperatedBucket) -> Finish | None:
        if context is None:  # not a member
            return None
        with use(context), torch.no_grad():
            return start(context, bucket)

    return operation


def reduced(
    group: BaguaProcessGroup | None,
    *,
    hierarchical: bool,
    average: bool,
    scattergather: bool,
    compression: str | Compressor | None,
) -> BucketOperation:
    """Make an operation that sums or averages; see ``append_centralized_synchronous_op``."""
    compressor = compressor_by_name("append_centralized_synchronous_op", compression)
    in_parts = scattergather and not hierarchical and compressor is None
    verb: Callable[..., Handle[torch.Tensor]] = allreduce_nonblocking
    if hierarchical:
        verb = hierarchical_allreduce_nonblocking

    def start(context: Context, bucket: OperatedBucket) -> Finish:
        flat = bucket.gather()
        if in_parts:
            return _reduce_in_parts(context, bucket, flat, average=average)
        handle = verb(flat, average, name=bucket.label, compression=compressor, out=flat)

        def finish() -> None:
            handle.wait()
            bucket.scatter(flat)

        return finish

    return among(group, start)


def _reduce_in_parts(
    context: Context, bucket: OperatedBucket, flat: torch.Tensor, *, average: bool
) -> Finish:
    """Start reducing one part on each rank; all ranks gather all parts on completion."""
    n, numel = context.size, flat.numel()
    rows = zeros((n, -(-numel // n)), flat.dtype, flat.device)
    rows.view(-1)[:numel].copy_(flat)
    handle = reduce_scatter_nonblocking(rows, average, name=bucket.label)

    def finish() -> None:
        with use(context), torch.no_grad():
            whole = allgather(handle.wait(), name=bucket.label)
            flat.copy_(whole.view(-1)[:numel])
        bucket.scatter(flat)

    return finish
