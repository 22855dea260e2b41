"""``BaguaDistributedDataParallel``: trains a model through hooks on it and on its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncddp.algorithms.gradient_hooks import WeakMethodHook
from asyncddp.algorithms.wrapper_setup import next_label
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.integrations.bagua.torch_api.algorithms.base import (
    WRAPPER,
    Algorithm,
    AlgorithmImpl,
)
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import (
    LibraryAlgorithm,
    LibraryMethod,
)
from asyncddp.integrations.bagua.torch_api.bucket_scheduler import BucketScheduler
from asyncddp.integrations.bagua.torch_api.data_parallel.hook_driver import HookDriver
from asyncddp.integrations.bagua.torch_api.data_parallel.method_driver import (
    MethodDriver,
    require_dense_gradients,
)
from asyncddp.integrations.bagua.torch_api.model_state import (
    average_state,
    broadcast_optimizer,
    broadcast_state,
    communicated_parameters,
    communicated_state,
    ignored_names,
)
from asyncddp.integrations.bagua.torch_api.process_group import (
    BaguaProcessGroup,
    group_or_default,
)

__all__ = ["BaguaDistributedDataParallel", "wrap", "wrapper_of"]


class BaguaDistributedDataParallel:
    """Wrapper of a model that an algorithm trains on the ranks of a group.

    The model and its optimizers stay the user's objects: the wrapper works through hooks on the
    model and replaced methods of the optimizers. Making one is collective.

    Args:
        module: The model.
        optimizers: Its optimizers.
        algorithm: The algorithm.
        process_group: The ranks that train; all by default.
        do_flatten: Whether buckets of an ``AlgorithmImpl`` move tensors to flat memory.
        find_unused_parameters: Whether an ``AlgorithmImpl`` treats parameters that a backward pass
            has not used as having zero gradients.
        broadcast_buffers: Whether buffers are made equal at the start.

    Attributes:
        bagua_train_step_counter: Forward passes in training mode so far.
        bagua_module_name: Name of the model.
        parameters_to_ignore: Names of parameters that are not communicated.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | None = None,
        do_flatten: bool = True,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        self.module, self.optimizers = module, _checked_optimizers(optimizers)
        self.process_group = group_or_default(process_group)
        self._context = self.process_group.require_member("with_bagua")
        self.bagua_algorithm = algorithm
        self.bagua_module_name = next_label(self._context, f"{type(module).__name__}_")
        self.bagua_train_step_counter = 0
        self.do_flatten, self._broadcast_buffers = do_flatten, broadcast_buffers
        self.parameters_to_ignore = sorted(ignored_names(module))
        if not isinstance(algorithm, Algorithm):
            raise ArgumentError(
                "with_bagua: argument algorithm: expected an Algorithm, such as "
                f"GradientAllReduceAlgorithm(), got {algorithm!r}"
            )
        if isinstance(algorithm, LibraryAlgorithm):
            algorithm.check_optimizers(module, self.optimizers)
        self._synchronize(wrapper_of(module))
        self._driver = self._driver_of(
            algorithm.reify(self.process_group), find_unused_parameters=find_unused_parameters
        )
        hook = WeakMethodHook(self._before_forward)
        self._hook = module.register_forward_pre_hook(hook)

    def _synchronize(self, before: BaguaDistributedDataParallel | None) -> None:
        """Make models and optimizer states equal on all ranks: rank 0's, or an average model."""
        if before is None:
            self.broadcast_state()
            return
        before.end()
        average_state(self._context, communicated_state(self.module))
        for optimizer in self.optimizers:
            broadcast_optimizer(self._context, optimizer)

    def broadcast_state(self) -> None:
        """Broadcast the first rank's parameters, buffers and optimizer states; collective."""
        state = communicated_state(self.module, buffers=self._broadcast_buffers)
        broadcast_state(self._context, state)
        for optimizer in self.optimizers:
            broadcast_optimizer(self._context, optimizer)

    def _driver_of(
        self, reified: Any, *, find_unused_parameters: bool
    ) -> HookDriver | MethodDriver:
        if isinstance(reified, LibraryMethod):
            return MethodDriver(self, reified)
        if not isinstance(reified, AlgorithmImpl):
            raise ArgumentError(
                f"with_bagua: argument algorithm: {type(self.bagua_algorithm).__name__}.reify gave "
                f"{reified!r}; expected an AlgorithmImpl"
            )
        require_dense_gradients(self.module)
        driver = HookDriver(self, reified, find_unused_parameters=find_unused_parameters)
        self._driver = driver  # hooks look at the wrapper while the driver builds
        driver.start()
        return driver

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training:
            self.bagua_train_step_counter += 1
            self._driver.before_forward(inputs)

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the model."""
        return self.optimizers

    @property
    def bagua_buckets(self) -> list[Any]:
        """Buckets, in the order in which they are sent."""
        return self._driver.buckets

    @property
    def _bagua_backend(self) -> BucketScheduler:
        if not isinstance(self._driver, HookDriver):
            raise UsageError(
                "_bagua_backend: this model is trained by a method of the library, whose buckets "
                "are its own; only an AlgorithmImpl of yours has a back end"
            )
        return self._driver.scheduler

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters to communicate, in the order of registration."""
        return communicated_parameters(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside a ``with`` block."""
        return self._driver.no_sync()

    def abort(self) -> None:
        """Stop asynchronous averaging; collective; without effect if there is none."""
        self._driver.abort()

    def resume(self) -> None:
        """Resume asynchronous averaging."""
        self._driver.resume()

    def end(self) -> None:
        """Finish all communication, and remove the wrapper from the model and its optimizers."""
        self._hook.remove()
        self._driver.end()
        vars(self.module).pop(WRAPPER, None)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a model that is copied or saved does not take it along


def _checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    single = isinstance(optimizers, torch.optim.Optimizer)
    found = [optimizers] if single else list(optimizers)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise ArgumentError(
                "with_bagua: argument optimizers: expected a list of torch.optim optimizers, got "
                f"one with {type(one).__name__}"
            )
    return found


def wrapper_of(module: torch.nn.Module) -> BaguaDistributedDataParallel | None:
    """Return the wrapper of a model; None if it is not wrapped."""
    found = vars(module).get(WRAPPER)
    return found if isinstance(found, BaguaDistributedDataParallel) else None


def wrap(module: torch.nn.Module, *args: Any, **kwargs: Any) -> BaguaDistributedDataParallel:
    """Wrap a model, after removing an earlier wrapper, and return the wrapper.

    The arguments are those of :class:`BaguaDistributedDataParallel`.
    """
    wrapper = BaguaDistributedDataParallel(module, *args, **kwargs)
    vars(module)[WRAPPER] = wrapper
    return wrapper
