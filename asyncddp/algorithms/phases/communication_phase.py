"""Base classes of communication phases, which decide when in a training step ranks average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import finalize

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.accumulation_counter import AccumulationCounter
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.training_setup import require_dense
from asyncddp.algorithms.training_tracer import TrainingTracer
from asyncddp.algorithms.weak_hooks import WeakMethodHook, remove_hooks
from asyncddp.errors import ArgumentError
from asyncddp.tensors.buckets import ParameterBucket, partition

Closure: TypeAlias = Callable[[], Any]
Update: TypeAlias = Callable[[Closure | None], Any]
NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class PhaseConfig:
    """Settings of a communication phase: averager, optimizer, models and bucket size.

    Attributes:
        averager: Begins the averaging rounds.
        optimizer: The user's own optimizer.
        models: The modules to which the optimizer's parameters belong.
        passes_per_round: ``num_steps_per_communication``.
        bucket_bytes: Largest size of a bucket, in bytes.
        training_tracer: Records the training loop in the timeline; None where it is off.
    """

    averager: ModelAverager
    optimizer: torch.optim.Optimizer
    models: Sequence[torch.nn.Module]
    passes_per_round: int
    bucket_bytes: int
    training_tracer: TrainingTracer | None = None

    def optimizer_parameters(self) -> NamedTensors:
        """List names and parameters of the optimizer that require gradients, in its order.

        Raises:
            ArgumentError: One of the optimizer's parameters belongs to none of the models, is
                sparse, or has no memory.
        """
        names = {
            id(parameter): f"{number}.{name}" if len(self.models) > 1 else name
            for number, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }
        named = []
        for group, options in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(options["params"]):
                if id(parameter) not in names:
                    raise ArgumentError(
                        f"argument optimizer: parameter {position} of group {group}, of shape "
                        f"{tuple(parameter.shape)}, belongs to none of the models given; pass the "
                        "model that owns it, or a list of models"
                    )
                if parameter.requires_grad and parameter.numel():
                    named.append((names[id(parameter)], parameter))
        for name, parameter in named:
            require_dense(name, parameter)
        return named


class CommunicationPhase(ABC):
    """Communication phase (base class): decides when in a training step ranks average.

    Args:
        config: Averager, optimizer and models of the wrapper.
    """

    needs_gradient_hooks = True
    """Whether it registers hooks that run when a gradient is ready."""

    def __init__(self, config: PhaseConfig) -> None:
        self.config = config
        self.accumulation = AccumulationCounter(config.passes_per_round)
        self.named_parameters: NamedTensors = []
        self._in_step = False
        self._gradient_hooks: list[RemovableHandle] = []
        self._model_hooks: list[RemovableHandle] = []
        for hooks in (self._gradient_hooks, self._model_hooks):
            finalize(self, remove_hooks, hooks).atexit = False

    @abstractmethod
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Run ``optimizer.step(closure)``, with averaging.

        Args:
            update: Runs the user's optimizer, with a closure or None.
            closure: The user's closure, or None.
            scaled: Whether a GradScaler made the call.
        """

    @abstractmethod
    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a parameter any more."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the pending round, since the parameters are about to be replaced."""

    @abstractmethod
    def build_buckets(self) -> None:
        """Assign the parameters of ``self.named_parameters`` to flat buckets."""

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the flat tensors that rounds average."""
        return []

    def conclude(self) -> None:  # noqa: B027 - optional hook
        """Finish the pending round, since no step follows for now."""

    def gradient_ready(self, index: int) -> None:
        """Handle that parameter ``index`` has accumulated a gradient."""
        if not self._in_step:
            self.accumulation.record(index)

    def synchronize(self) -> None:  # noqa: B027 - optional hook
        """Average the gradients that are not averaged yet, before the step."""

    def on_zero_grad(self) -> None:  # noqa: B027 - optional hook
        """Handle that the user has called ``zero_grad()``."""

    def repair_buckets(self) -> bool:
        """Return whether the buckets still fit the parameters, after repair where possible."""
        return True

    def rebuild_if_changed(self) -> None:
        """Rebuild the buckets if the user has changed the set of parameters or their tensors.

        Groups may have been added, parameters frozen, moved, cast or assigned anew. All ranks
        must do the same.
        """
        if self.config.averager.single_rank:
            return
        before, current = [p for _, p in self.named_parameters], self._parameters()
        same = len(before) == len(current) and all(map(_is, before, current))
        if not (same and self.repair_buckets()):
            self.rebuild()

    def rebuild(self) -> None:
        """Rebuild all buckets and gradient hooks."""
        remove_hooks(self._gradient_hooks)
        self.named_parameters = self.config.optimizer_parameters()
        self.build_buckets()
        if self.needs_gradient_hooks:
            for index, (_, parameter) in enumerate(self.named_parameters):
                hook = WeakMethodHook(self._on_gradient, index)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._gradient_hooks.append(handle)

    def detach(self) -> None:
        """Remove all hooks; ``step()`` keeps working without overlap."""
        remove_hooks(self._gradient_hooks)
        remove_hooks(self._model_hooks)
        self.needs_gradient_hooks = False

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        del parameter
        self.gradient_ready(index)

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.config.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel()
        ]


class ParameterAveragingPhase(CommunicationPhase):
    """Communication phase (base class) that averages parameters held in flat buckets."""

    def __init__(self, config: PhaseConfig) -> None:
        super().__init__(config)
        self.buckets: list[ParameterBucket] = []
        if not config.averager.single_rank:
            self.rebuild()

    def build_buckets(self) -> None:
        """Make the parameters views of flat buckets, in shared memory where possible."""
        group = self.config.averager.context.transport.shared_memory_group
        make = None if group is None else group.arena.empty
        with torch.no_grad():
            self.buckets = [
                ParameterBucket([self.named_parameters[index] for index in indices], make)
                for indices in partition(
                    [p for _, p in self.named_parameters], self.config.bucket_bytes
                )
            ]
        self.config.averager.set_buckets(self.flat_tensors())

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the flat tensors that rounds average."""
        return [bucket.flat for bucket in self.buckets]

    def repair_buckets(self) -> bool:
        """Make detached parameters views again; returns False where that needs new buckets."""
        with torch.no_grad():
            return all([bucket.reattach() for bucket in self.buckets])


def _is(one: object, other: object) -> bool:
    return one is other
