"""``OverlappingWrapper`` of the old API: the hooks by which a reducer works in backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.gradient_hooks import claim_parameters, hook_gradients, remove_hooks
from asyncddp.integrations.bagua.torch_api.distributed_define import BucketType
from asyncddp.integrations.bagua.torch_api.distributed_module import DistributedModule
from asyncddp.integrations.bagua.torch_api.ready_gradients import ReadyGradients
from asyncddp.integrations.bagua.torch_api.reducer import Reducer
from asyncddp.parallel.module_wrapper import TransparentModuleWrapper

__all__ = ["OverlappingWrapper"]


class OverlappingWrapper(TransparentModuleWrapper):
    """Wrapper of a distributed module, which sends its buckets during the backward pass.

    Args:
        module: The module.
        optimizers: Its optimizers.
        delay_reduce: Whether to send all buckets at the end of the backward pass.
        bucket_type: What buckets send.
        hierarchical_reduce: Whether one rank of each node communicates with other nodes.
        decentralize_reduce: Whether the whole model is sent once in each iteration, with the first
            gradient; the first iteration sends nothing.
        parameter_manager: Has no effect.
        align_bytes: As of ``Reducer``, like the arguments below.
        chunking: Whether each rank reduces a part.
        fusion: Whether weights and gradients of a bucket are moved to flat tensors.
        **kwargs: Further arguments of ``Reducer``.

    Attributes:
        reducer: The reducer.
    """

    module: DistributedModule
    reducer: Reducer
    averager = None

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
        self._hooks: list[RemovableHandle] = []
        self._backward_pass, self._sent = ReadyGradients(self._on_backward_end), False
        self._at_end: Callable[[], None] | None = None
        self.reset_reducer()

    def reset_reducer(
        self,
        hierarchical_reduce: bool | None = None,
        buckets: Sequence[Sequence[str | Mapping[str, Any]]] | None = None,
    ) -> None:
        """Replace the reducer, between two iterations, by one with other settings; collective.

        Args:
            hierarchical_reduce: None leaves it.
            buckets: Names of parameters of each bucket; None leaves it.
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
        """Hook the gradients of all parameters that are sent."""
        self._named = list(self.reducer.param_dict.items())
        parameters = [parameter for _, parameter in self._named]
        claim_parameters(parameters, self)
        self._backward_pass.forget_counts()
        self._hooks += hook_gradients(parameters, self._on_gradient)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and get ready for its backward pass."""
        if self._backward_pass.forget_failed():
            self.reducer.backend.forget_ready_tensors()
        self._sent = False
        result = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._backward_pass.hook(result)
        return result

    # a backward pass

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.decentralize_reduce:
            self._backward_pass.begin()
            self._send_weights_once()
        elif not self.reducer.bucket_initialized:
            self._backward_pass.count(index)
            self.reducer.add_param(parameter)
            self._at_end = self._initialize_and_reduce
        elif self.delay_reduce:
            self._backward_pass.begin()
            self._at_end = self._reduce_all
        else:
            if self._backward_pass.is_ready(index, self._named[index][0]):
                self.reducer.mark_tensor_ready(parameter)
            self._at_end = self._mark_rest

    def _send_weights_once(self) -> None:
        """Send the weights with the first gradient of an iteration, but for the very first."""
        if self._sent:
            return
        self._sent = True
        if not self.reducer.bucket_initialized:
            self._at_end = self._initialize
        elif self.delay_reduce:
            self._at_end = self._reduce_all
        else:
            self._mark_all()
            self._at_end = self.reducer.mark_on_complete

    def _on_backward_end(self) -> None:
        action, self._at_end = self._at_end, None
        if action is not None:
            action()

    def _initialize(self) -> None:
        self.reducer.initialize_buckets()

    def _initialize_and_reduce(self) -> None:
        self.reducer.initialize_buckets()
        self._reduce_all()

    def _reduce_all(self) -> None:
        self._mark_all()
        self.reducer.mark_on_complete()

    def _mark_rest(self) -> None:
        for index in self._backward_pass.not_marked():
            self.reducer.mark_tensor_ready(self._named[index][1])
        self.reducer.mark_on_complete()

    def _mark_all(self) -> None:
        for number, bucket in enumerate(self.reducer.param_buckets):
            self.reducer.mark_bucket_ready(bucket, number)

    # around iterations

    def wait_for_reads(self) -> None:
        """Wait until no operation reads a parameter any more."""
        self.reducer.backend.wait_pending_comm_ops()

    def detach(self) -> None:
        """Wait until all operations have ended, and remove all hooks."""
        if self._hooks:
            self.wait_for_reads()
        remove_hooks(self._hooks)
