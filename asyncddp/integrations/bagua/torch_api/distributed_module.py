"""``DistributedModule`` of Bagua's old API, and a subclass for each of its algorithms."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.compression import Compressor as LibraryCompressor
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from asyncddp.integrations.bagua.torch_api.bucket_operations import (
    Finish,
    OperatedBucket,
    compressor_by_name,
)
from asyncddp.integrations.bagua.torch_api.bucket_scheduler import BucketScheduler
from asyncddp.integrations.bagua.torch_api.decentralized_operations import DecentralizedOperation
from asyncddp.integrations.bagua.torch_api.distributed_define import Compressor, ReduceOp
from asyncddp.integrations.bagua.torch_api.model_state import ignored_names
from asyncddp.parallel.module_wrapper import TransparentModuleWrapper

__all__ = ["Allreducer", "DecentralizedReducer", "DistributedModule", "ScatterGatherAllreducer"]


class DistributedModule(TransparentModuleWrapper):
    """Base class of module wrappers whose buckets an algorithm averages or sums between ranks.

    Args:
        module: The module.

    Attributes:
        parameters_to_ignore: Names of parameters that are not communicated.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> DistributedModule(model).unwrap() is model
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.parameters_to_ignore = sorted(ignored_names(module))

    def unwrap(self) -> torch.nn.Module:
        """Return the wrapped module."""
        return self.module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **kwargs)

    def set_communication_op(self, bucket: BaguaBucket, *, hierarchical_reduce: bool) -> None:
        """Append the algorithm's operations to a bucket."""
        raise NotImplementedError

    def post_backward_fn(self, backend: BucketScheduler) -> None:
        """Finish a backward pass, after the operations have ended."""


class Allreducer(DistributedModule):
    """Module wrapper whose buckets are averaged or summed over all ranks.

    Args:
        module: The module.
        reduce_op: Average or sum.
        compressor: Compressor of messages, or a name of ``asyncddp.compression``; None sends them
            uncompressed.
    """

    scattergather = False

    def __init__(
        self,
        module: torch.nn.Module,
        reduce_op: ReduceOp = ReduceOp.Average,
        compressor: Compressor | LibraryCompressor | str | None = None,
    ) -> None:
        super().__init__(module)
        self.reduce_op = _checked_op(reduce_op)
        name = compressor.value if isinstance(compressor, Compressor) else compressor
        self.compressor = compressor_by_name("bagua_init", name)

    @override
    def set_communication_op(self, bucket: BaguaBucket, *, hierarchical_reduce: bool) -> None:
        bucket.append_centralized_synchronous_op(
            hierarchical=hierarchical_reduce,
            average=self.reduce_op is ReduceOp.Average,
            scattergather=self.scattergather,
            compression=self.compressor,
        )


class ScatterGatherAllreducer(Allreducer):
    """Module wrapper whose buckets are reduced in parts, one by each rank, and then gathered."""

    scattergather = True


class DecentralizedReducer(DistributedModule):
    """Module wrapper whose weights are averaged with all ranks or one peer in backward passes.

    Args:
        module: The module.
        peer_selection_mode: ``"all"`` or ``"shift_one"``.
        communication_interval: Number of iterations from one average to the next.
        reduce_op: ``ReduceOp.Average``.
        compressor: None.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
        reduce_op: ReduceOp = ReduceOp.Average,
        compressor: None = None,
    ) -> None:
        super().__init__(module)
        if _checked_op(reduce_op) is not ReduceOp.Average or compressor is not None:
            raise ArgumentError(
                "bagua_init: arguments reduce_op, compressor: Decentralize averages weights as "
                f"they are; expected Average and None, got {reduce_op} and {compressor!r}"
            )
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = checked_integer(
            "bagua_init: argument communication_interval", communication_interval, 1
        )
        self._averagings: list[tuple[BaguaBucket, _IntervalOperation]] = []

    @override
    def set_communication_op(self, bucket: BaguaBucket, *, hierarchical_reduce: bool) -> None:
        averaging = bucket.append_decentralized_synchronous_op(
            bucket.flattened_tensor(), hierarchical_reduce, self.peer_selection_mode
        )
        gated = _IntervalOperation(averaging, self.communication_interval)
        bucket.operations[-1] = gated
        self._averagings.append((bucket, gated))

    @override
    def post_backward_fn(self, backend: BucketScheduler) -> None:
        for bucket, gated in self._averagings:
            if gated.has_run:
                gated.operation.copy_back_peer_weight(bucket)


class _IntervalOperation:
    """Bucket operation that runs only every few calls, starting with the first."""

    def __init__(self, operation: DecentralizedOperation, interval: int) -> None:
        self.operation, self._interval = operation, interval
        self._executions, self.has_run = 0, False

    def __call__(self, bucket: OperatedBucket) -> Finish | None:
        """Start the operation if its turn has come."""
        self.has_run = self._executions % self._interval == 0
        self._executions += 1
        return self.operation(bucket) if self.has_run else None


def _checked_op(reduce_op: Any) -> ReduceOp:
    if not isinstance(reduce_op, ReduceOp):
        raise ArgumentError(
            f"bagua_init: argument reduce_op: expected {ReduceOp.Sum} or {ReduceOp.Average}, got "
            f"{reduce_op!r}"
        )
    return reduce_op
