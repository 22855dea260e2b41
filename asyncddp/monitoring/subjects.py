"""What is monitored: optimizers and modules, seen as one thing that makes steps."""

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
from asyncddp.parallel.asynchronous import Asynchronous
from asyncddp.parallel.blocks import Block
from asyncddp.windows import Staleness

__all__ = ["Subject", "subject_of"]


class Subject(ABC):
    """Something that makes steps and averages.

    Attributes:
        context: Its world.
        label: Its name in messages, equal on all ranks.
    """

    context: Context
    label: str

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """Whether ranks wait for each other, so that they make the same step at about one time."""

    @property
    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """What is trained."""

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
        """Whether no rank is done while others train."""
        return True

    def prepare(self) -> None:  # noqa: B027 - not all need it
        """The step that begins will be reported."""

    @abstractmethod
    def gradient_norm(self) -> float | None:
        """The norm of the gradients of the step that is reported; None where there were none."""

    @property
    @abstractmethod
    def departed(self) -> tuple[int, ...]:
        """Neighbours that have left the averaging, ascending."""

    @abstractmethod
    def staleness(self) -> dict[int, Staleness]:
        """How old what was mixed last of each neighbour is."""

    @abstractmethod
    def attach(self, stepped: Callable[[], None], reports: Callable[[], bool]) -> None:
        """Begin to call ``stepped`` after each step.

        Args:
            stepped: What to call.
            reports: Whether the step under way will be reported.
        """

    @abstractmethod
    def detach(self) -> None:
        """Call nothing any more."""


class OptimizerSubject(Subject):
    """A distributed optimizer, with any method.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer, self._mixer = optimizer, optimizer._mixer
        self.context, self.label = self._mixer.context, self._mixer.label
        self._squares: dict[int, torch.Tensor] = {}
        self._listeners: list[RemovableHandle] = []

    @property
    def in_step(self) -> bool:
        """Whether it averages by messages, or its ranks meet in every round."""
        how = self._mixer.communication.how
        return how is None or not how.one_sided or self._mixer.force_barrier

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of the groups that require gradients."""
        every = (p for group in self._optimizer.param_groups for p in group["params"])
        return [parameter for parameter in every if parameter.requires_grad and parameter.numel()]

    @property
    def bytes_sent(self) -> int:
        """As the mixer has counted."""
        return self._mixer.bytes_sent

    @property
    def exposed_seconds(self) -> float:
        """As the mixer has measured."""
        return self._mixer.exposed.seconds

    @property
    def all_ranks_step(self) -> bool:
        """Whether none is in a join block."""
        return self._mixer.attendance is None

    @property
    def departed(self) -> tuple[int, ...]:
        """As the optimizer says."""
        return self._optimizer.departed

    def prepare(self) -> None:
        """Note each gradient as backward passes give it, before anybody clips or averages it."""
        self._forget()
        for parameter in self.parameters:
            if parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
                self._listeners.append(hook)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(_values(parameter.grad.detach())).double()
            self._squares[id(parameter)] = norm.square()

    def _forget(self) -> None:
        self._squares.clear()
        for listener in self._listeners:
            listener.remove()
        self._listeners.clear()

    def gradient_norm(self) -> float | None:
        """Of the gradients as backward passes gave them, or of what is there where none did.

        Where a GradScaler's ``unscale_`` was called before the step, its factor is not known here:
        then it is the norm of what the step has used.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        unscaled = getattr(self._optimizer, "found_inf", None) is not None and scale is None
        squares = list(self._squares.values())
        self._forget()
        if not squares or unscaled:
            square = squared_norm(parameter.grad for parameter in self.parameters)
            return None if square is None else math.sqrt(square)
        norm = math.sqrt(float(torch.stack([one.to(squares[0].device) for one in squares]).sum()))
        return norm if scale is None else norm / float(scale)

    def staleness(self) -> dict[int, Staleness]:
        """As the optimizer's windows say."""
        return self._optimizer.staleness()

    def attach(self, stepped: Callable[[], None], reports: Callable[[], bool]) -> None:
        """Listen after the optimizer's steps."""
        del reports

        def hook(*step: Any) -> None:
            """Say that a step was made."""
            del step
            stepped()

        self._hook = self._optimizer.register_step_post_hook(hook)

    def detach(self) -> None:
        """Listen no more."""
        self._forget()
        self._hook.remove()


class ModuleSubject(Subject):
    """A decentralized module; it hears of updates, since its gradients do not outlive them.

    Args:
        module: The module.
    """

    def __init__(self, module: DecentralizedDataParallel) -> None:
        self._module, self._stepper = module, module._stepper
        self._exchange = self._stepper.exchange
        self.context, self.label = self._exchange.context, self._exchange.label
        self._square: float | None = None

    @property
    def in_step(self) -> bool:
        """Whether it is synchronous."""
        return not isinstance(self._exchange, Asynchronous)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those it trains."""
        return [parameter for _, parameter in self._stepper.named]

    @property
    def bytes_sent(self) -> int:
        """As the exchange has counted."""
        return self._exchange.bytes_sent

    @property
    def exposed_seconds(self) -> float:
        """As the exchange has measured."""
        return self._exchange.exposed.seconds

    def gradient_norm(self) -> float | None:
        """Of the gradients of the step before they were clipped, without a GradScaler's factor."""
        return None if self._square is None else math.sqrt(self._square)

    @property
    def departed(self) -> tuple[int, ...]:
        """As the module says."""
        return self._module.departed

    def staleness(self) -> dict[int, Staleness]:
        """As the module's windows say."""
        return self._module.staleness()

    def attach(self, stepped: Callable[[], None], reports: Callable[[], bool]) -> None:
        """Listen to the stepper."""
        self._call, self._reports = stepped, reports
        self._stepper.listener = self

    def detach(self) -> None:
        """Listen no more."""
        if self._stepper.listener is self:
            self._stepper.listener = None

    def updating(self, block: Block) -> None:
        """Note the gradients of a block, if its step will be reported."""
        if self._reports():
            square = squared_norm(parameter.grad for parameter in block.parameters)
            if square is not None:
                self._square = square + (self._square or 0.0)

    def stepped(self) -> None:
        """A step was completed."""
        self._call()
        self._square = None


def squared_norm(gradients: Iterable[torch.Tensor | None]) -> float | None:
    """The sum of all squares; None where no gradient is there."""
    there = [gradient.detach() for gradient in gradients if gradient is not None]
    if not there:
        return None
    norms = [torch.linalg.vector_norm(_values(gradient)).double() for gradient in there]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def subject_of(watched: object) -> Subject:
    """The subject that somebody wants to monitor.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(watched, DistributedOptimizer):
        return OptimizerSubject(watched)
    if isinstance(watched, DecentralizedDataParallel):
        return ModuleSubject(watched)
    hint = (
        "the wrapper, not the optimizer in it"
        if isinstance(watched, torch.optim.Optimizer)
        else "what the training loop steps with"
    )
    raise ArgumentError(
        "monitor: argument watched: expected a DistributedOptimizer or a "
        f"DecentralizedDataParallel, got {type(watched).__name__}; give {hint}"
    )
