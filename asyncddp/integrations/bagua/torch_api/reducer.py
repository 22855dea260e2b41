"""``Reducer`` of Bagua's old API: builds buckets in the order of gradients, and sends them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncddp.algorithms.wrapper_setup import checked_integer, next_label
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from asyncddp.integrations.bagua.torch_api.bucket_scheduler import (
    BucketScheduler,
    suggested_groups,
)
from asyncddp.integrations.bagua.torch_api.distributed_define import BucketType
from asyncddp.integrations.bagua.torch_api.distributed_module import DistributedModule
from asyncddp.integrations.bagua.torch_api.model_state import communicated_parameters
from asyncddp.integrations.bagua.torch_api.process_group import default_group
from asyncddp.integrations.bagua.torch_api.tensor import gradient_of, set_gradient
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks

__all__ = ["Reducer"]

_CHUNK_BYTES = 32
"""Alignment, in bytes, of each rank's part of a bucket that is cut into parts."""
_LEAST_ALIGNMENT = 8


class Reducer:
    """Reducer of one module: assigns its parameters to buckets, and sends each when it is ready.

    In the first backward pass :meth:`add_param` records the order of gradients. At its end
    :meth:`initialize_buckets` builds buckets in that order, :meth:`mark_bucket_ready` sends them,
    and :meth:`mark_on_complete` waits. Afterwards :meth:`mark_tensor_ready` is called for each
    gradient, and :meth:`mark_on_complete` at the end of each pass.

    Args:
        module: The module, which defines the operations on a bucket.
        optimizers: Its optimizers.
        bucket_type: Tensors that buckets send.
        hierarchical_reduce: Whether one rank of each node communicates with other nodes.
        align_bytes: Power of two, at least 8, to which the bytes of a bucket are rounded up.
        chunking: Whether each rank reduces a part; buckets then have a multiple of 32 bytes for
            each.
        fusion: Whether weights and gradients of a bucket are moved to two flat tensors.
        decentralize_reduce: Whether the whole model is one bucket.
        buckets: Names of parameters of each bucket, or declarations with a ``"name"``; by default
            the order of the first backward pass decides.
        message_size: Bytes at which a bucket is closed.
        priority: Has no effect: transports choose streams by themselves.

    Attributes:
        bucket_initialized: Whether buckets have been built.
        param_buckets: Parameters of each bucket.
        step_counter: Completed backward passes.
        backend: The scheduler of the buckets.

    Raises:
        ArgumentError: An invalid argument.
    """

    def __init__(
        self,
        module: DistributedModule,
        optimizers: Sequence[torch.optim.Optimizer],
        bucket_type: BucketType,
        hierarchical_reduce: bool,
        align_bytes: int,
        chunking: bool,
        fusion: bool,
        decentralize_reduce: bool = False,
        buckets: Sequence[Sequence[str | Mapping[str, Any]]] = (),
        *,
        message_size: int = 10_000_000,
        priority: int | None = None,
    ) -> None:
        if not hasattr(module, "set_communication_op"):
            raise ArgumentError(
                "Reducer: argument module: expected a DistributedModule with set_communication_op, "
                f"got {type(module).__name__}"
            )
        self._context: Context = default_group().require_member("Reducer")
        self.module, self.optimizers, self.bucket_type = module, list(optimizers), bucket_type
        self.hierarchical_reduce, self.chunking, self.fusion = hierarchical_reduce, chunking, fusion
        self.decentralize_reduce = decentralize_reduce
        self.align_bytes = self._checked_alignment(align_bytes)
        self.message_size = checked_integer("argument message_size", message_size, 1)
        self.priority = priority
        self.buckets = [[_name_of(one) for one in bucket] for bucket in buckets]
        self.param_dict = dict(communicated_parameters(module))
        self.param_name = {id(one): name for name, one in self.param_dict.items()}
        self.param_buckets: list[list[torch.nn.Parameter]] = []
        self.bucket_initialized, self.step_counter = False, 0
        self.backend = BucketScheduler(next_label(self._context, "Reducer"))
        self._order: dict[str, None] = {}

    def _checked_alignment(self, align_bytes: Any) -> int:
        given = checked_integer("argument align_bytes", align_bytes, _LEAST_ALIGNMENT)
        if given & (given - 1):
            raise ArgumentError(f"argument align_bytes: expected a power of two, got {given}")
        if not self.chunking:
            return given
        nodes = self._context.machine_size
        return max(
            given, _CHUNK_BYTES * (nodes if self.hierarchical_reduce else self._context.size)
        )

    def fill_slot(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the tensor that a bucket sends for a parameter: gradient, weight or parameter.

        Raises:
            UsageError: The parameter has no gradient.
        """
        if self.bucket_type is BucketType.Param:
            return param
        if self.bucket_type is BucketType.Weight:
            return param.data
        if param.grad is None:
            raise UsageError(f"fill_slot: parameter {self.param_name[id(param)]} has no gradient")
        return param.grad.data

    def add_param(self, param: torch.Tensor) -> None:
        """Record that a parameter has got its gradient, before buckets are built."""
        name = self.param_name.get(id(param))
        if name is not None:
            self._order.setdefault(name)

    def initialize_buckets(self) -> list[list[torch.nn.Parameter]]:
        """Build the buckets, after the first backward pass; collective.

        They hold the parameters that the first rank has recorded, in its order.

        Returns:
            The parameters of each bucket.

        Raises:
            MismatchError: Other parameters got gradients on other ranks.
        """
        if not self.buckets:
            self.buckets = [
                [tensor.bagua_tensor_name for tensor in group]  # type: ignore[attr-defined]
                for group in self._suggested()
            ]
        self.param_buckets = [[self._parameter(name) for name in names] for names in self.buckets]
        self.register_bagua_buckets()
        self.bucket_initialized = True
        return self.param_buckets

    def _suggested(self) -> list[list[torch.Tensor]]:
        names = list(self.param_dict if self.decentralize_reduce else self._order)
        claim = "buckets need gradients of the same parameters on all ranks"
        require_equal_on_all_ranks(self._context, claim, [f"{sorted(names)}"])
        with use(self._context):
            first = gather_records(names, list[str], "order of gradients")[0]
        size = sys.maxsize if self.decentralize_reduce else self.message_size
        return suggested_groups([self._communicated(name) for name in first], size)

    def _parameter(self, name: str) -> torch.nn.Parameter:
        if name not in self.param_dict:
            raise ArgumentError(f"argument buckets: no parameter has the name {name!r}")
        return self.param_dict[name]

    def _communicated(self, name: str) -> torch.Tensor:
        """Make a parameter a communicated tensor that refers to the tensor to send."""
        parameter: Any = self._parameter(name)
        of_gradient = self.bucket_type is BucketType.Gradient
        closures = (gradient_of, set_gradient) if of_gradient else (None, None)
        if of_gradient:
            parameter.bagua_ensure_grad()
        communicated: torch.Tensor = parameter.ensure_bagua_tensor(
            name, type(self.module).__name__, *closures
        )
        return communicated

    def register_bagua_buckets(self) -> None:
        """Make buckets of ``param_buckets`` with the module's operations, and register them."""
        made = []
        for number, parameters in enumerate(self.param_buckets):
            names = [self.param_name[id(one)] for one in parameters]
            tensors = [self._communicated(name) for name in names]
            alignment = max(1, self.align_bytes // parameters[0].element_size())
            bucket = BaguaBucket(tensors, f"bucket_{number}", self.fusion, alignment)
            if self.fusion:
                self._fuse_others(parameters, alignment)
            self.module.set_communication_op(bucket, hierarchical_reduce=self.hierarchical_reduce)
            made.append(bucket)
        self.backend.register_ordered_buckets(made)

    def _fuse_others(self, parameters: Sequence[Any], alignment: int) -> None:
        """Move weights, or gradients, to a second flat tensor, at the bucket's offsets."""
        views = []
        for parameter in parameters:
            of_gradient = self.bucket_type is not BucketType.Gradient and parameter.grad is not None
            closures = (gradient_of, set_gradient) if of_gradient else (None, None)
            if of_gradient or self.bucket_type is BucketType.Gradient:
                views.append(parameter.to_bagua_tensor(f"{id(parameter)}", "", *closures))
        if views:
            BaguaBucket(views, "beside", flatten=True, alignment=alignment)

    def mark_tensor_ready(self, param: torch.Tensor) -> None:
        """Mark a parameter's gradient as ready; a bucket is sent once all its gradients are ready.

        Raises:
            UsageError: It had no gradient in the pass from which the buckets were built.
        """
        name = self.param_name.get(id(param))
        if name is None:
            return  # it is to be ignored
        if not any(name in bucket for bucket in self.buckets):
            raise UsageError(
                f"parameter {name} has got a gradient, and had none in the first backward pass, "
                "from which the buckets were built; call reset_reducer() on all ranks before"
            )
        param.bagua_mark_communication_ready()  # type: ignore[attr-defined]

    def mark_all(self) -> None:
        """Mark all parameters of all buckets as ready."""
        for number, bucket in enumerate(self.param_buckets):
            self.mark_bucket_ready(bucket, number)

    def mark_bucket_ready(
        self, bucket: Sequence[torch.nn.Parameter], bucket_idx: int | None = None
    ) -> None:
        """Mark all parameters of one of ``param_buckets`` as ready."""
        for param in bucket:
            self.mark_tensor_ready(param)

    def mark_on_complete(self) -> None:
        """Wait until all buckets that were sent are complete, and end the iteration.

        Raises:
            UsageError: A parameter of a bucket has got no gradient in this pass.
        """
        self.backend.wait_pending_comm_ops()
        missing = self.backend.missing_tensors()
        if missing:
            raise UsageError(
                f"parameters {', '.join(missing)} have got no gradient in this backward pass, as "
                "they had in the first, so that other ranks may wait for them; use the same "
                "parameters in each pass"
            )
        self.module.post_backward_fn(self.backend)
        self.step_counter += 1


def _name_of(declared: str | Mapping[str, Any]) -> str:
    return declared if isinstance(declared, str) else str(declared["name"])
