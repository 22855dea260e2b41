"""Training of a wrapped model through the hooks of an ``AlgorithmImpl``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.algorithms.gradient_hooks import (
    WeakMethodHook,
    claim_parameters,
    hook_gradients,
    remove_hooks,
)
from asyncddp.algorithms.wrapper_setup import next_label
from asyncddp.errors import UsageError
from asyncddp.integrations.bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModel
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from asyncddp.integrations.bagua.torch_api.bucket_scheduler import (
    BucketScheduler,
    suggested_groups,
)
from asyncddp.integrations.bagua.torch_api.data_parallel.optimizer_routing import Closure, route_of
from asyncddp.integrations.bagua.torch_api.env import get_default_bucket_size


class HookDriver:
    """Driver that trains a wrapped model through an algorithm's hooks.

    Args:
        wrapped: The wrapper of the model; its ``_bagua_backend`` is the driver's ``scheduler``.
        algorithm: The algorithm.
        find_unused_parameters: Whether parameters without a gradient count as zero at the end of a
            backward pass; otherwise they are an error.
    """

    averager = None

    def __init__(
        self, wrapped: WrappedModel, algorithm: AlgorithmImpl, *, find_unused_parameters: bool
    ) -> None:
        context = wrapped.process_group.require_member("with_bagua")
        self._wrapped, self._algorithm = wrapped, algorithm
        self._find_unused = find_unused_parameters
        self.scheduler = BucketScheduler(next_label(context, "with_bagua"))
        self._buckets: list[BaguaBucket] = []
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._backward_pass, self._paused = BackwardPass(self._on_backward_end), False
        self._marked: set[int] = set()  # parameters marked ready in this pass
        self._gradient_hooks: list[RemovableHandle] = []
        self._model_hooks: list[RemovableHandle] = []
        self._targets: list[_HookedSteps] = []

    def start(self) -> None:
        """Build tensors, buckets and hooks; the wrapper must refer to this driver already."""
        claim_parameters([one for _, one in self._wrapped.bagua_build_params()], self)
        self._build()
        module = self._wrapped.module
        self._model_hooks.append(module.register_forward_hook(WeakMethodHook(self._after_forward)))
        self._targets = [_HookedSteps(one, self) for one in self._wrapped.optimizers]
        for target in self._targets:
            route_of(target.optimizer).target = target

    def _build(self) -> None:
        wrapped, algorithm = self._wrapped, self._algorithm
        remove_hooks(self._gradient_hooks)
        self.scheduler.register_ordered_buckets([])
        groups = suggested_groups(algorithm.init_tensors(wrapped), get_default_bucket_size())
        self._buckets = list(algorithm.tensors_to_buckets(groups, wrapped.do_flatten))
        self.scheduler.register_ordered_buckets(self._buckets)
        for bucket in self._buckets:
            algorithm.init_operations(wrapped, bucket)
        self._forward_pre = algorithm.init_forward_pre_hook(wrapped)
        self._backward = algorithm.init_backward_hook(wrapped)
        self._post_backward = algorithm.init_post_backward_hook(wrapped)
        self.post_step = algorithm.init_post_optimizer_step_hook(wrapped)
        self._named = wrapped.bagua_build_params()
        self._backward_pass.forget_counts()
        parameters = [parameter for _, parameter in self._named]
        self._gradient_hooks += hook_gradients(parameters, self._on_gradient)

    @property
    def buckets(self) -> list[Any]:
        """Buckets, in the order in which they are sent."""
        return list(self._buckets)

    # a step

    def before_forward(self, inputs: Any) -> None:
        """Prepare for a forward pass in training mode."""
        if self._backward_pass.forget_failed():
            self._marked.clear()
            self.scheduler.forget_ready_tensors()
        if self._paused:
            return
        if self._algorithm.need_reset():
            self._wrapped.broadcast_state()
            self._build()
        self._forward_pre(inputs)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._backward_pass.hook(output)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self._paused:
            return
        self._backward_pass.count(index)
        name, own = self._named[index]
        if index in self._marked:
            raise UsageError(
                f"parameter {name} got another gradient in a backward pass, after the one before "
                "had been marked ready, which it did not in passes before; use "
                "checkpoint(..., use_reentrant=False)"
            )
        if self._backward_pass.is_last(index):
            self._marked.add(index)
            self._backward(name, own)

    def _on_backward_end(self) -> None:
        marked, self._marked = self._marked, set()
        if self._paused:
            return
        for index in self._backward_pass.counted():
            if index not in marked:
                self._backward(*self._named[index])
        if self._find_unused:
            for index, (name, parameter) in enumerate(self._named):
                if not self._backward_pass.reached(index):
                    parameter.bagua_ensure_grad()  # type: ignore[attr-defined]
                    self._backward(name, parameter)
        self._post_backward()
        by_default = type(self._algorithm).init_backward_hook is AlgorithmImpl.init_backward_hook
        missing = self.scheduler.missing_tensors() if by_default else []
        if missing:
            raise UsageError(
                f"with_bagua: parameters {', '.join(missing)} have got no gradient in this "
                "backward pass, so that other ranks may wait for them; use all parameters in each "
                "pass, or give find_unused_parameters=True to DistributedDataParallel"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside a ``with`` block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # around steps

    def abort(self) -> None:
        """Do nothing: there is no asynchronous averaging."""

    resume = abort

    def wait_for_reads(self) -> None:
        """Wait until no operation reads parameters any more."""
        self.scheduler.wait_pending_comm_ops()

    def detach(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._gradient_hooks)
        remove_hooks(self._model_hooks)

    def end(self) -> None:
        """Finish all communication, and restore the model and its optimizers."""
        self.scheduler.register_ordered_buckets([])
        self.detach()
        for target in self._targets:
            route_of(target.optimizer).target = None


class _HookedSteps:
    """Steps of an optimizer, each followed by a call of the algorithm's hook."""

    def __init__(self, optimizer: torch.optim.Optimizer, driver: HookDriver) -> None:
        self.optimizer, self._driver = optimizer, driver

    def step(self, closure: Closure | None = None) -> Any:
        """Make the optimizer's own step, and call the algorithm's hook."""
        result = route_of(self.optimizer).own_step(closure)
        self._driver.post_step(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        route_of(self.optimizer).own_zero_grad(set_to_none)

    def state_loaded(self) -> None:
        """Do nothing: algorithms read the optimizer's state when they need it."""
