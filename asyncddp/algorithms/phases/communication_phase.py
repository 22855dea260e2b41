"""Base classes of communication phases, which decide when in a training step ranks average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, TypeAlias
from weakref import finalize

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.algorithms.gradient_hooks import WeakMethodHook, hook_gradients, remove_hooks
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases.accumulation_counter import AccumulationCounter
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.algorithms.wrapper_setup import require_dense
from asyncddp.errors import ArgumentError
from asyncddp.tensors.buckets import NamedFlatBucket
from asyncddp.topology.builders import TopologyLike

Closure: TypeAlias = Callable[[], Any]
Update: TypeAlias = Callable[[Closure | None], Any]
NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class PhaseConfig:
    """Settings of a communication phase: averager, optimizer, wrapped models, bucket size."""

    averager: ModelAverager
    optimizer: torch.optim.Optimizer
    models: Sequence[torch.nn.Module]
    bucket_bytes: int
    training_tracer: NullTrainingTracer
    passes_per_round: int = 1
    """``num_steps_per_communication``."""
    counts_steps: bool = False
    """True if a round follows after so many steps, whatever their backward passes."""
    first_round_at_once: bool = False
    """True if the first step averages, and then every ``passes_per_round``-th."""

    @property
    def first_carried_passes(self) -> int:
        """Number of passes that count as made before the first step."""
        return self.passes_per_round - 1 if self.first_round_at_once else 0

    def optimizer_parameters(self) -> NamedTensors:
        """List names and parameters of the optimizer that require gradients, in its order."""
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
    """Communication phase (base class): decides when in a training step ranks average."""

    needs_gradient_hooks = True
    """True if it registers hooks that run when a gradient is ready."""
    hooks_forward: ClassVar[bool] = False
    """True if :meth:`_on_forward` runs before forward passes of the models."""

    def __init__(self, config: PhaseConfig) -> None:
        self.config = config
        self.accumulation = AccumulationCounter(
            config.passes_per_round, counts_steps=config.counts_steps
        )
        self.accumulation.carried_passes = config.first_carried_passes
        self.backward_pass = BackwardPass(self._on_backward_end)
        self.named_parameters: NamedTensors = []
        self._in_step = False
        self._gradient_hooks: list[RemovableHandle] = []
        self._model_hooks: list[RemovableHandle] = []
        for hooks in (self._gradient_hooks, self._model_hooks):
            finalize(self, remove_hooks, hooks).atexit = False

    @property
    def averager(self) -> ModelAverager:
        """The averager of the buckets."""
        return self.config.averager

    @abstractmethod
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Run ``optimizer.step(closure)``, with averaging; ``scaled`` if a GradScaler calls it.

        ``update`` runs the user's optimizer, with a closure or None.
        """

    def before_update(self) -> None:  # noqa: B027 - only methods of parameters have the hook
        """Let the method see the gradients, and replace them, just before the optimizer does."""

    def wait_for_reads(self) -> None:  # noqa: B027 - buckets of gradients are read freely
        """Wait until no message or peer reads a parameter any more."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the pending round, since the parameters are about to be replaced."""

    @abstractmethod
    def build_buckets(self) -> None:
        """Assign the parameters of ``self.named_parameters`` to flat buckets."""

    @abstractmethod
    def repair_buckets(self) -> bool:
        """Return whether the buckets still fit the parameters, after repair where possible."""

    def conclude(self) -> None:  # noqa: B027 - optional hook
        """Finish the pending round, since no step follows for now."""

    def settle(self) -> None:  # noqa: B027 - of the others no round lasts from step to step
        """Take what the pending round has brought into the state, which is to be saved."""

    def round_to_resume(self, saved: int) -> int:
        """Return the number of rounds with which to go on from a checkpoint."""
        return saved

    def abort(self) -> None:  # noqa: B027 - of the others no round goes on by itself
        """End rounds that go on by themselves, once all ranks have asked for it; collective."""

    def resume(self) -> None:  # noqa: B027 - as above
        """Let rounds go on by themselves again."""

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if not self._in_step:
            self._count_gradient(index)

    def _count_gradient(self, index: int) -> int:
        """Count a gradient, the first of a pass as a pass; return which of the pass it is."""
        count = self.backward_pass.count(index)
        if count == 1:
            self.accumulation.record(index)
        return count

    def synchronize(self) -> None:  # noqa: B027 - optional hook
        """Average the gradients that are not averaged yet, before the step."""

    def on_zero_grad(self) -> None:  # noqa: B027 - optional hook
        """Handle that the user has called ``zero_grad()``."""

    def rebuild_if_changed(self) -> None:
        """Rebuild the buckets if the user has changed the set of parameters or their tensors.

        Groups may have been added, parameters frozen, moved, cast or assigned anew. All ranks
        must do the same.
        """
        if self.config.averager.idle:
            return
        before, current = [p for _, p in self.named_parameters], self.parameters()
        same = len(before) == len(current) and all(map(is_, before, current))
        if not (same and self.repair_buckets()):
            self.rebuild()

    def _set_averaged_buckets(
        self,
        flats: Sequence[torch.Tensor],
        buckets: Sequence[NamedFlatBucket],
        left_out: Collection[str] = (),
    ) -> None:
        """Tell the averager what rounds average: a flat tensor in each bucket's layout."""
        self.config.averager.set_buckets(
            [
                AveragedBucket(index, flat, bucket, self.config.optimizer)
                for index, (flat, bucket) in enumerate(zip(flats, buckets, strict=True))
            ],
            left_out,
        )

    def rebuild(self) -> None:
        """Rebuild all buckets and gradient hooks."""
        remove_hooks(self._gradient_hooks)
        self.backward_pass.forget_counts()
        self.named_parameters = self.config.optimizer_parameters()
        self.build_buckets()
        if self.needs_gradient_hooks:
            parameters = (parameter for _, parameter in self.named_parameters)
            self._gradient_hooks += hook_gradients(parameters, self._on_gradient)

    def _start(self) -> None:
        """Build the buckets and hook the models, where there are other ranks."""
        if self.config.averager.idle:
            return
        self.rebuild()
        for model in self.config.models:
            if self.hooks_forward:
                before = WeakMethodHook(self._on_forward)
                self._model_hooks.append(model.register_forward_pre_hook(before))
            if self.needs_gradient_hooks:
                after = WeakMethodHook(self._after_forward)
                self._model_hooks.append(model.register_forward_hook(after))

    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:  # noqa: B027 - optional
        """Handle that a forward pass begins."""

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Have the backward pass begin where it reaches the model's output."""
        self.backward_pass.forget_failed()
        if torch.is_grad_enabled():
            self.backward_pass.hook(output)

    def _on_backward_end(self) -> None:  # noqa: B027 - optional
        """Handle that the outermost backward pass has ended."""

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Use another topology from now on."""
        self.averager.set_topology(topology)

    def close(self) -> None:
        """Finish the pending round, and free the windows; collective."""
        self.conclude()
        self.wait_for_reads()
        self.averager.windows.free()

    def detach(self) -> None:
        """Remove all hooks; ``step()`` keeps working without overlap."""
        remove_hooks(self._gradient_hooks)
        remove_hooks(self._model_hooks)
        self.needs_gradient_hooks = False

    def parameters(self) -> list[torch.Tensor]:
        """List the parameters of the optimizer that require gradients, in its order."""
        return [
            parameter
            for group in self.config.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel()
        ]
