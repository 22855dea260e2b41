"""``OverlappingWrapper`` of Bagua's old API: sends buckets during backward passes, by hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from asyncddp.integrations.bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    BackwardHook,
    PostBackwardHook,
    WrappedModel,
)
from asyncddp.integrations.bagua.torch_api.data_parallel.bagua_distributed import (
    BaguaDistributedDataParallel,
)
from asyncddp.integrations.bagua.torch_api.distributed_define import BucketType
from asyncddp.integrations.bagua.torch_api.distributed_module import DistributedModule
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup
from asyncddp.integrations.bagua.torch_api.reducer import Reducer
from asyncddp.parallel.module_wrapper import TransparentModuleWrapper

__all__ = ["OverlappingWrapper"]


class _ReducerHooks(Algorithm, AlgorithmImpl):
    """Algorithm whose hooks drive a reducer, which builds its buckets after the first pass."""

    def __init__(self, reducer: Reducer, *, delay: bool) -> None:
        self._reducer, self._delays = reducer, delay
        self._sent = self._due = False

    @override
    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        return self

    @override
    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        self._reducer.backend = bagua_ddp._bagua_backend
        return []

    @override
    def init_backward_hook(self, bagua_ddp: WrappedModel) -> BackwardHook:
        return self._on_gradient

    @override
    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> PostBackwardHook:
        return self._on_backward_end

    def begin_iteration(self) -> None:
        """Allow weights to be sent once more."""
        self._sent = False

    def _on_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        reducer, overlaps = self._reducer, not self._delays
        if reducer.decentralize_reduce:
            first, self._sent = not self._sent, True
            self._due |= first
            if first and overlaps and reducer.bucket_initialized:
                reducer.mark_all()
            return
        self._due = True
        if not reducer.bucket_initialized:
            reducer.add_param(parameter)
        elif overlaps:
            reducer.mark_tensor_ready(parameter)

    def _on_backward_end(self) -> None:
        reducer, due = self._reducer, self._due
        self._due = False
        if not due:
            return
        begins = not reducer.bucket_initialized
        if begins:
            reducer.initialize_buckets()
        if begins and reducer.decentralize_reduce:
            return  # the first iteration sends nothing
        if begins or self._delays:
            reducer.mark_all()
        reducer.mark_on_complete()


class _ReducedModule(BaguaDistributedDataParallel):
    """Model wrapper that does not broadcast the model at its start, unlike its base class."""

    @override
    def _synchronize(self, before: BaguaDistributedDataParallel | None) -> None: ...


class OverlappingWrapper(TransparentModuleWrapper):
    """Wrapper of a distributed module that sends its buckets during the backward pass.

    Args:
        module: The module.
        optimizers: Its optimizers.
        delay_reduce: Whether to send all buckets at the end of the backward pass.
        bucket_type: Tensors that buckets send.
        hierarchical_reduce: Whether one rank of each node communicates with other nodes.
        decentralize_reduce: Whether the whole model is sent once in each iteration, with the first
            gradient; the first iteration sends nothing.
        parameter_manager: Has no effect.
        align_bytes: As in ``Reducer``, like the arguments below.
        chunking: Whether each rank reduces a part.
        fusion: Whether weights and gradients of a bucket are moved to flat tensors.
        **kwargs: Further arguments of ``Reducer``.

    Attributes:
        reducer: The reducer.
    """

    module: DistributedModule
    reducer: Reducer

    def __init__(
        self,
        module: DistributedModule,
        optimizers: Sequence[torch.optim.Optimizer],
        delay_reduce: bool = False,
        bucket_type: BucketType = BucketType.Gradient,
        hierarchical_reduce: bool = False,
        decentralize_reduce: bool = False,
        parameter_manager: None = None,
        align_bytes: int = 8,
        chunking: bool = False,
        fusion: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(module)
        self.delay_reduce, self.decentralize_reduce = delay_reduce, decentralize_reduce
        self.hierarchical_reduce = hierarchical_reduce
        self._optimizers, self._bucket_type = optimizers, bucket_type
        self._options: dict[str, Any] = {
            "align_bytes": align_bytes,
            "chunking": chunking,
            "fusion": fusion,
        }
        self._options |= {"decentralize_reduce": decentralize_reduce, **kwargs}
        self._wrapper: BaguaDistributedDataParallel | None = None
        self.reset_reducer()

    def reset_reducer(
        self,
        hierarchical_reduce: bool | None = None,
        buckets: Sequence[Sequence[str | Mapping[str, Any]]] | None = None,
    ) -> None:
        """Replace the reducer by one with other settings, between two iterations; collective.

        Args:
            hierarchical_reduce: None keeps the setting.
            buckets: Names of the parameters of each bucket; None keeps the setting.
        """
        self.detach()
        if hierarchical_reduce is not None:
            self.hierarchical_reduce = hierarchical_reduce
        if buckets is not None:
            self._options["buckets"] = buckets
        self.reducer = Reducer(
            self.module,
            self._optimizers,
            self._bucket_type,
            self.hierarchical_reduce,
            **self._options,
        )
        self.create_hooks()

    def create_hooks(self) -> None:
        """Add hooks to the gradients of all parameters that are sent."""
        self._hooks = _ReducerHooks(self.reducer, delay=self.delay_reduce)
        self._wrapper = _ReducedModule(self.module, [], self._hooks)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare for its backward pass."""
        self._hooks.begin_iteration()
        return self.module(*inputs, **kwargs)

    def detach(self) -> None:
        """Wait until all operations have ended, and remove all hooks."""
        if self._wrapper is not None:
            self._wrapper.end()
