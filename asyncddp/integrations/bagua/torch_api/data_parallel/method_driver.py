"""Training of a model in Bagua's wrapper by one of asyncddp's algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from asyncddp.algorithms import ALGORITHMS, AveragedQuantity
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.errors import SparseGradientError
from asyncddp.integrations.bagua.torch_api.algorithms.base import WrappedModel
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryMethod
from asyncddp.integrations.bagua.torch_api.data_parallel.optimizer_routing import (
    RoutedOptimizer,
    route_of,
)
from asyncddp.integrations.bagua.torch_api.env import (
    get_autotune_level,
    get_default_bucket_size,
)
from asyncddp.integrations.bagua.torch_api.model_state import unmanaged_parameters
from asyncddp.optim import DistributedOptimizer
from asyncddp.tensors.allocation import detached_copy


class BaguaOptimizer(DistributedOptimizer):
    """Distributed optimizer that Bagua's wrapper makes of each of the user's optimizers."""

    def state_loaded(self) -> None:
        """Switch to the stage of the newly loaded state; collective for ``qadam``."""
        settings = self._switcher.settings
        if settings.algorithm == "qadam":
            self.switch_to("qadam", replicas="keep", **settings.options)

    @property
    def buckets(self) -> Sequence[AveragedBucket]:
        """Averaged buckets; empty if there is one rank."""
        return self._averager.buckets


class BucketView:
    """View of one of asyncddp's buckets, with the attributes of Bagua's buckets.

    Attributes:
        name: Name of the bucket.
        tensors: The parameters whose values, gradients or momentum the bucket holds.
        backend_tensor: The flat tensor that is sent.
    """

    def __init__(self, name: str, bucket: AveragedBucket) -> None:
        self.name, self.tensors, self.backend_tensor = name, bucket.parameters, bucket.flat

    def bytes(self) -> int:
        """Return the size in bytes, including padding."""
        return self.backend_tensor.nbytes

    def flattened_tensor(self) -> torch.Tensor:
        """Return a copy of the flat tensor."""
        return detached_copy(self.backend_tensor)


class MethodDriver:
    """Driver that trains a model in Bagua's wrapper by one of asyncddp's algorithms.

    If gradients are averaged, parameters without an optimizer get one whose steps change nothing.

    Args:
        wrapped: The wrapper of the model.
        method: The method.
    """

    def __init__(self, wrapped: WrappedModel, method: LibraryMethod) -> None:
        trained = {id(parameter) for _, parameter in wrapped.bagua_build_params()}
        sends_gradients = ALGORITHMS[method.name].what is not AveragedQuantity.PARAMETER
        if sends_gradients:
            require_dense_gradients(wrapped.module)
        optimizers = list(wrapped.optimizers)
        unmanaged = [one for _, one in unmanaged_parameters(wrapped.module, optimizers)]
        if unmanaged and ALGORITHMS[method.name].what is AveragedQuantity.GRADIENT:
            optimizers.append(torch.optim.SGD(unmanaged, lr=0.0))
        if not optimizers:
            raise ArgumentError(
                f"with_bagua: argument optimizers: {method.name} communicates in the steps of "
                "optimizers; expected those of the model, got none"
            )
        self._distributed: list[BaguaOptimizer] = []
        for optimizer in optimizers:
            left_out = frozenset(
                id(parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad and id(parameter) not in trained
            )
            self._distribute(wrapped, RoutedOptimizer(optimizer, left_out), method)
        self._optimizers = optimizers

    def _distribute(
        self, wrapped: WrappedModel, optimizer: RoutedOptimizer, method: LibraryMethod
    ) -> None:
        context = wrapped.process_group.require_member("with_bagua")
        steps = optimizer.wrapped in wrapped.optimizers
        tunes = get_autotune_level() > 0 and method.name == "gradient_allreduce" and steps
        with use(context):
            distributed = BaguaOptimizer(
                optimizer,
                wrapped.module,
                method.name,
                bucket_size_in_mb=get_default_bucket_size() / 2**20,
                autotune=tunes,
                broadcast=False,
                **method.arguments,
            )
        route_of(optimizer.wrapped).target = distributed
        self._distributed.append(distributed)

    def before_forward(self, inputs: Any) -> None:
        """Do nothing: the optimizers have hooks of their own."""

    @property
    def buckets(self) -> list[Any]:
        """Buckets, in the order in which they are sent."""
        every = [bucket for one in self._distributed for bucket in one.buckets]
        return [BucketView(str(number), bucket) for number, bucket in enumerate(every)]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside a ``with`` block."""
        with ExitStack() as stack:
            for distributed in self._distributed:
                stack.enter_context(distributed.no_sync())
            yield

    def abort(self) -> None:
        """Stop asynchronous averaging; collective."""
        for distributed in self._distributed:
            distributed.abort()

    def resume(self) -> None:
        """Resume asynchronous averaging."""
        for distributed in self._distributed:
            distributed.resume()

    def end(self) -> None:
        """Finish all communication, and restore the model and its optimizers."""
        for optimizer, distributed in zip(self._optimizers, self._distributed, strict=True):
            distributed.close()
            route_of(optimizer).target = None


def require_dense_gradients(module: torch.nn.Module) -> None:
    """Raise SparseGradientError if an embedding of the module has sparse gradients."""
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(
            part, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise SparseGradientError(
                f"with_bagua: {name} has sparse gradients, which cannot be averaged in buckets; "
                "build it with sparse=False, or average parameters, as DecentralizedAlgorithm does"
            )
