"""Base classes of algorithms, their registry, and the interface of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch

from asyncddp.errors import ArgumentError, UnknownNameError
from asyncddp.integrations.bagua.errors import AlgorithmNameError
from asyncddp.integrations.bagua.torch_api.bucket import BaguaBucket
from asyncddp.integrations.bagua.torch_api.bucket_scheduler import BucketScheduler
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup
from asyncddp.integrations.bagua.torch_api.tensor import gradient_of, set_gradient
from asyncddp.registry import nearest

__all__ = ["Algorithm", "AlgorithmImpl", "AlgorithmRegistry", "WrappedModel"]

ForwardPreHook: TypeAlias = Callable[[Any], Any]
BackwardHook: TypeAlias = Callable[[str, torch.nn.Parameter], Any]
PostBackwardHook: TypeAlias = Callable[[], Any]
PostStepHook: TypeAlias = Callable[[torch.optim.Optimizer], Any]

WRAPPER = "_bagua_ddp"
"""Name of the attribute in which a model holds its wrapper."""


class WrappedModel(Protocol):
    """Interface of a model's wrapper, as algorithms use it."""

    module: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    process_group: BaguaProcessGroup
    bagua_module_name: str
    bagua_train_step_counter: int
    """Forward passes in training mode so far, counted from 1 in the first."""
    do_flatten: bool

    @property
    def bagua_buckets(self) -> Sequence[Any]:
        """Buckets, in the order in which they are sent."""

    @property
    def _bagua_backend(self) -> BucketScheduler:
        """Scheduler that launches buckets and waits for them."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters to communicate, in the order of registration."""

    def broadcast_state(self) -> None:
        """Broadcast the first rank's model and optimizer states; collective."""

    def abort(self) -> None:
        """Stop asynchronous averaging; collective."""

    def resume(self) -> None:
        """Resume asynchronous averaging."""


def wrapped_model(caller: str, module: torch.nn.Module) -> WrappedModel:
    """Return the wrapper of a model, or of the model inside a DistributedDataParallel.

    Raises:
        ArgumentError: The model is not wrapped.
    """
    for one in (module, getattr(module, "module", None)):
        found = vars(one).get(WRAPPER) if isinstance(one, torch.nn.Module) else None
        if found is not None:
            return cast("WrappedModel", found)
    raise ArgumentError(
        f"{caller}: argument bagua_ddp: expected a model that with_bagua has wrapped, got "
        f"{type(module).__name__}"
    )


class AlgorithmImpl:
    """Base class of an algorithm applied to one model: its tensors, buckets, operations and hooks.

    By default it marks gradients ready and waits at the end of the backward pass; a subclass
    overrides the rest. Each ``init_…_hook`` is called once, and returns the hook.

    Args:
        process_group: The ranks among which the model is trained.
    """

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Return True to rebuild tensors, buckets and hooks before a forward pass."""
        return False

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """Return the tensors to communicate: by default all gradients, the last one first."""
        return [
            parameter.bagua_ensure_grad().ensure_bagua_tensor(  # type: ignore[attr-defined]
                name, bagua_ddp.bagua_module_name, gradient_of, set_gradient
            )
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(
        self, tensors: list[list[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Build buckets from suggested groups of tensors: by default one bucket for each group."""
        return [
            BaguaBucket(group, name=str(number), flatten=do_flatten)
            for number, group in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Append operations to a new bucket."""

    def init_forward_pre_hook(self, bagua_ddp: WrappedModel) -> ForwardPreHook:
        """Return a hook that is called with the inputs before forward passes in training mode."""
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: WrappedModel) -> BackwardHook:
        """Return a hook that is called with name and parameter when a gradient is ready."""
        return lambda name, parameter: parameter.bagua_mark_communication_ready()  # type: ignore[attr-defined]

    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> PostBackwardHook:
        """Return a hook that is called at the end of a backward pass."""
        return bagua_ddp._bagua_backend.wait_pending_comm_ops

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> PostStepHook:
        """Return a hook that is called with an optimizer after its step."""
        return lambda optimizer: None


class Algorithm:
    """Base class of algorithms with options, as users choose them; one may train several models.

    Example:
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> bagua.algorithms.Algorithm.init("bytegrad", hierarchical=False)
        ByteGradAlgorithm(hierarchical=False, average=True)
    """

    def reify(self, process_group: BaguaProcessGroup) -> Any:
        """Return the algorithm applied to one model: an ``AlgorithmImpl``."""
        raise NotImplementedError(f"{type(self).__name__} has no reify(process_group)")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Create the declaration of a registered algorithm by its name.

        Args:
            name: A name that was registered.
            **kwargs: Arguments of its class.

        Raises:
            AlgorithmNameError: The name is no string.
            UnknownNameError: No algorithm has the name.
        """
        return GlobalAlgorithmRegistry.get(name)(**kwargs)


class AlgorithmRegistry:
    """Registry of algorithms by name; programs may add their own."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Callable[..., Algorithm], str]] = {}

    def register(
        self,
        name: str,
        algorithm: Callable[..., Algorithm],
        description: str = "",
        override: bool = False,
    ) -> Callable[..., Algorithm]:
        """Register a subclass of ``Algorithm`` under a name, and return it.

        Raises:
            AlgorithmNameError: The name is no string.
            ArgumentError: The name is taken, and ``override`` is not set.
        """
        self._check(name)
        if name in self._entries and not override:
            raise ArgumentError(
                f"register: argument name: {name!r} is registered already; choose another one, or "
                "give override=True"
            )
        self._entries[name] = algorithm, description
        return algorithm

    def get(self, name: str) -> Callable[..., Algorithm]:
        """Return the class registered under a name; errors are those of ``Algorithm.init``."""
        self._check(name)
        if name not in self._entries:
            known = self.available_algorithms()
            raise UnknownNameError(
                f"unknown algorithm {name!r}; known are: {', '.join(known)}.{nearest(name, known)}"
            )
        return self._entries[name][0]

    def available_algorithms(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._entries)

    def _check(self, name: Any) -> None:
        if not isinstance(name, str):
            raise AlgorithmNameError(
                f"argument name: expected the name of an algorithm as a string, got {name!r}"
            )


GlobalAlgorithmRegistry = AlgorithmRegistry()
"""The algorithms that ``Algorithm.init`` knows."""
