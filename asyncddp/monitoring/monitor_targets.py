"""Adapters that give a monitor one interface to the optimizer or module that it watches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.context import Context
from asyncddp.errors import ArgumentError
from asyncddp.optim import DistributedOptimizer
from asyncddp.parallel import DecentralizedDataParallel
from asyncddp.parallel.optimizer_buckets import OptimizerBucket
from asyncddp.windows import Staleness


class MonitorTarget(ABC):
    """Interface through which a monitor watches an optimizer or module that trains and averages.

    Attributes:
        context: The context of its ranks.
        label: Its name in messages, equal on all ranks.
    """

    context: Context
    label: str

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """True if ranks wait for each other, so that they make the same step at about one time."""

    @property
    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are trained."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Payload bytes sent to peers so far."""

    @property
    @abstractmethod
    def exposed_seconds(self) -> float:
        """Time that averaging has taken on the caller's thread so far."""

    @property
    def all_ranks_step(self) -> bool:
        """True unless some ranks may be done while others train."""
        return True

    def prepare(self) -> None:  # noqa: B027 - not all need it
        """Prepare for a step that will be reported."""

    @abstractmethod
    def gradient_norm(self) -> float | None:
        """Return the gradient norm of the reported step; None where there were no gradients."""

    @property
    @abstractmethod
    def departed(self) -> tuple[int, ...]:
        """Neighbours that have left the averaging, ascending."""

    @abstractmethod
    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of each neighbour's last averaged values."""

    @abstractmethod
    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        """Begin to call ``on_step`` after each step.

        Args:
            on_step: The callback.
            is_reported: Returns True if the step under way will be reported.
        """

    @abstractmethod
    def detach(self) -> None:
        """Stop calling the callbacks."""


class OptimizerTarget(MonitorTarget):
    """Adapter through which a monitor watches a distributed optimizer.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer, self._averager = optimizer, optimizer._averager
        self.context, self.label = self._averager.context, self._averager.label
        self._squares: dict[int, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def in_step(self) -> bool:
        """True if it averages by messages, or with a barrier in every round."""
        how = self._averager.communication.how
        return how is None or not how.one_sided or self._averager.force_barrier

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the groups that require gradients."""
        every = (p for group in self._optimizer.param_groups for p in group["params"])
        return [parameter for parameter in every if parameter.requires_grad and parameter.numel()]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent, as the averager has counted."""
        return self._averager.bytes_sent

    @property
    def exposed_seconds(self) -> float:
        """Exposed time, as the averager has measured."""
        return self._averager.exposed_time.seconds

    @property
    def all_ranks_step(self) -> bool:
        """True outside a join block."""
        return self._averager.join_coordinator is None

    @property
    def departed(self) -> tuple[int, ...]:
        """Departed neighbours, as the optimizer reports."""
        return self._optimizer.departed

    def prepare(self) -> None:
        """Register hooks that add up gradient norms before clipping and averaging."""
        self._remove_hooks()
        for parameter in self.parameters:
            if parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._add_square)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _add_square(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(_values(parameter.grad.detach())).double()
            self._squares[id(parameter)] = norm.square()

    def _remove_hooks(self) -> None:
        self._squares.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def gradient_norm(self) -> float | None:
        """Return the norm of the gradients as backward passes gave them, or of those present.

        Where a GradScaler's ``unscale_`` was called before the step, its factor is not known here:
        then it is the norm of what the step has used.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        unscaled = getattr(self._optimizer, "found_inf", None) is not None and scale is None
        squares = list(self._squares.values())
        self._remove_hooks()
        if not squares or unscaled:
            square = squared_norm(parameter.grad for parameter in self.parameters)
            return None if square is None else math.sqrt(square)
        norm = math.sqrt(float(torch.stack([one.to(squares[0].device) for one in squares]).sum()))
        return norm if scale is None else norm / float(scale)

    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of the optimizer's windows."""
        return self._optimizer.staleness()

    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        """Register a hook after the optimizer's steps."""
        del is_reported

        def hook(*step: Any) -> None:
            """Call the callback after a step."""
            del step
            on_step()

        self._hook = self._optimizer.register_step_post_hook(hook)

    def detach(self) -> None:
        """Remove the hooks."""
        self._remove_hooks()
        self._hook.remove()


class ModuleTarget(MonitorTarget):
    """Adapter through which a monitor reads a model that is wrapped for averaging with neighbours.

    Args:
        module: The module.
    """

    def __init__(self, module: DecentralizedDataParallel) -> None:
        self._module, self._reducer = module, module._reducer
        self._averager = self._reducer.bucket_averager.averager
        self.context, self.label = self._averager.context, self._averager.label
        self._square: float | None = None

    @property
    def in_step(self) -> bool:
        """True if averaging is synchronous."""
        return not self._averager.communication.uses_windows

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the module."""
        return [parameter for _, parameter in self._reducer.named_parameters]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent, as the averager has counted."""
        return self._averager.bytes_sent

    @property
    def exposed_seconds(self) -> float:
        """Exposed time, as the averager has measured."""
        return self._averager.exposed_time.seconds

    def gradient_norm(self) -> float | None:
        """Return the norm of the gradients before clipping, without a GradScaler's factor."""
        return None if self._square is None else math.sqrt(self._square)

    @property
    def departed(self) -> tuple[int, ...]:
        """Departed neighbours, as the module reports."""
        return self._module.departed

    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of the module's windows."""
        return self._module.staleness()

    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        """Register as the listener of the module's reducer."""
        self._on_step, self._is_reported = on_step, is_reported
        self._reducer.observer = self

    def detach(self) -> None:
        """Remove the hooks."""
        if self._reducer.observer is self:
            self._reducer.observer = None

    def before_update(self, bucket: OptimizerBucket) -> None:
        """Add the gradients of a bucket to the norm, if the step will be reported."""
        if self._is_reported():
            square = squared_norm(parameter.grad for parameter in bucket.parameters)
            if square is not None:
                self._square = square + (self._square or 0.0)

    def after_step(self) -> None:
        """Call the callback after a step."""
        self._on_step()
        self._square = None


def squared_norm(gradients: Iterable[torch.Tensor | None]) -> float | None:
    """Sum the squares of all gradients; None where there is no gradient."""
    there = [gradient.detach() for gradient in gradients if gradient is not None]
    if not there:
        return None
    norms = [torch.linalg.vector_norm(_values(gradient)).double() for gradient in there]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def find_target(watched: object) -> MonitorTarget:
    """Return the target for an optimizer or module.

    Raises:
        ArgumentError: It is neither.
    """
    if isinstance(watched, DistributedOptimizer):
        return OptimizerTarget(watched)
    if isinstance(watched, DecentralizedDataParallel):
        return ModuleTarget(watched)
    hint = (
        "the wrapper, not the optimizer in it"
        if isinstance(watched, torch.optim.Optimizer)
        else "what the training loop steps with"
    )
    raise ArgumentError(
        "monitor: argument watched: expected a DistributedOptimizer or a "
        f"DecentralizedDataParallel, got {type(watched).__name__}; give {hint}"
    )
