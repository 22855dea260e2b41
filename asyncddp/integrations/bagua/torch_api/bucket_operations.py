"""Operations on buckets by the library's verbs: base classes, Python functions, averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from typing_extensions import override

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

Finish: TypeAlias = Callable[[], None]

_NAMES = {"MinMaxUInt8": "minmax_uint8"}
"""Bagua's names of compressors."""


class OperatedBucket(Protocol):
    """Bucket, as operations see it."""

    name: str
    label: str

    def gather(self) -> torch.Tensor:
        """Return a flat tensor with the values of now."""

    def scatter(self, flat: torch.Tensor) -> None:
        """Write a flat tensor back."""


def compressor_by_name(caller: str, name: str | Compressor | None) -> Compressor | None:
    """Return a compressor by Bagua's name or the library's; None for None."""
    if name is None:
        return None
    return compressor_for(caller, _NAMES.get(name, name) if isinstance(name, str) else name)


class BucketOperation(ABC):
    """Operation on a bucket (base class)."""

    @abstractmethod
    def start(self, bucket: OperatedBucket) -> Finish | None:
        """Start it on a bucket whose tensors are ready.

        Returns:
            What waits for it and writes its result; None if it is complete.
        """


class PythonOperation(BucketOperation):
    """Call of a Python function with the bucket's name."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    @override
    def start(self, bucket: OperatedBucket) -> None:
        self._function(bucket.name)


class GroupOperation(BucketOperation):
    """Operation among the ranks of a group (base class)."""

    def __init__(self, group: BaguaProcessGroup | None) -> None:
        self._context = group_or_default(group).context

    @override
    def start(self, bucket: OperatedBucket) -> Finish | None:
        if self._context is None:  # not a member
            return None
        with use(self._context), torch.no_grad():
            return self._start(self._context, bucket)

    @abstractmethod
    def _start(self, context: Context, bucket: OperatedBucket) -> Finish: ...


class CentralizedOperation(GroupOperation):
    """Sum or average over a group; see ``BaguaBucket.append_centralized_synchronous_op``."""

    def __init__(
        self,
        group: BaguaProcessGroup | None,
        *,
        hierarchical: bool,
        average: bool,
        scattergather: bool,
        compression: str | Compressor | None,
    ) -> None:
        super().__init__(group)
        self._hierarchical, self._average = hierarchical, average
        self._compression = compressor_by_name("append_centralized_synchronous_op", compression)
        self._scattergather = scattergather and not hierarchical and self._compression is None

    @override
    def _start(self, context: Context, bucket: OperatedBucket) -> Finish:
        flat = bucket.gather()
        if self._scattergather:
            return self._scatter_gather(context, bucket, flat)
        verb: Callable[..., Handle[torch.Tensor]] = allreduce_nonblocking
        if self._hierarchical:
            verb = hierarchical_allreduce_nonblocking
        handle = verb(
            flat, self._average, name=bucket.label, compression=self._compression, out=flat
        )

        def finish() -> None:
            handle.wait()
            bucket.scatter(flat)

        return finish

    def _scatter_gather(
        self, context: Context, bucket: OperatedBucket, flat: torch.Tensor
    ) -> Finish:
        """Start to reduce a part on each rank; all ranks get all parts afterwards."""
        n, numel = context.size, flat.numel()
        rows = zeros((n, -(-numel // n)), flat.dtype, flat.device)
        rows.view(-1)[:numel].copy_(flat)
        handle = reduce_scatter_nonblocking(rows, self._average, name=bucket.label)

        def finish() -> None:
            with use(context), torch.no_grad():
                whole = allgather(handle.wait(), name=bucket.label)
                flat.copy_(whole.view(-1)[:numel])
            bucket.scatter(flat)

        return finish
