"""Base class of communication phases, which determine when in a training step ranks average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
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
from asyncddp.algorithms.replicated_parts import ReplicatedParts
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.algorithms.wrapper_setup import require_trainable
from asyncddp.errors import ArgumentError
from asyncddp.tensors.buckets import NamedFlatBucket
from asyncddp.tensors.fsdp_params import register
from asyncddp.tensors.local_parts import local, reshard
from asyncddp.topology.builders import TopologyLike

Closure: TypeAlias = Callable[[], Any]
Update: TypeAlias = Callable[[Closure | None], Any]
NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class PhaseConfig:
    """Settings of a communication phase: averager, optimizer, models, bucket size, interval."""

    averager: ModelAverager
    optimizer: torch.optim.Optimizer
    models: Sequence[torch.nn.Module]
    bucket_bytes: int
    training_tracer: NullTrainingTracer
    passes_per_round: int = 1
    """``num_steps_per_communication``."""
    counts_steps: bool = False
    """True if steps are counted instead of backward passes."""
    first_round_at_once: bool = False
    """True if the first step averages, and then every ``passes_per_round``-th step."""

    @property
    def first_carried_passes(self) -> int:
        """Number of passes that are counted before the first step."""
        return self.passes_per_round - 1 if self.first_round_at_once else 0

    def optimizer_parameters(self) -> NamedTensors:
        """List the optimizer's parameters that require gradients, with names, in its order."""
        register(self.models)
        names = self._names()
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        if not held <= names.keys():
            reshard(self.models)
            names = self._names()
        named = []
        for group, options in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(options["params"]):
                if id(parameter) not in names:
                    raise ArgumentError(
                        f"argument optimizer: parameter {position} of group {group}, of shape "
                        f"{tuple(parameter.shape)}, belongs to none of the models given; pass the "
                        "model that owns it, or a list of models"
                    )
                if parameter.requires_grad and local(parameter).numel():
                    named.append((names[id(parameter)], parameter))
        for name, parameter in named:
            require_trainable(self.averager.context, name, parameter)
        return named

    def _names(self) -> dict[int, str]:
        """Return the names of the models' parameters, by id."""
        return {
            id(parameter): f"{number}.{name}" if len(self.models) > 1 else name
            for number, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }


class CommunicationPhase(ABC):
    """Base class of communication phases: determine when in a training step ranks average."""

    needs_gradient_hooks = True
    """True if the phase registers hooks that run when a gradient is ready."""
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
        self.copies = ReplicatedParts(config.averager.inner)
        self._in_step = False
        self._gradient_hooks: list[RemovableHandle] = []
        self._model_hooks: list[RemovableHandle] = []
        for hooks in (self._gradient_hooks, self._model_hooks):
            finalize(self, remove_hooks, hooks).atexit = False

    @property
    def averager(self) -> ModelAverager:
        """Averager of the buckets."""
        return self.config.averager

    @abstractmethod
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Run ``optimizer.step(closure)`` with averaging; ``scaled`` if called by a GradScaler.

        ``update`` runs the user's optimizer, with a closure or None.
        """

    def before_update(self) -> None:  # noqa: B027 - only methods of parameters have the hook
        """Let the method replace the gradients, just before the optimizer uses them."""

    def wait_for_reads(self) -> None:  # noqa: B027 - buckets of gradients are read freely
        """Wait until messages and peers have finished reading the parameters."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the pending round, since the parameters are about to be replaced."""

    @abstractmethod
    def build_buckets(self) -> None:
        """Assign the parameters of ``self.named_parameters`` to flat buckets."""

    @abstractmethod
    def repair_buckets(self) -> bool:
        """Repair the buckets if possible; return whether they fit the parameters."""

    def conclude(self) -> None:  # noqa: B027 - optional hook
        """Finish the pending round, since no step follows for now."""

    def settle(self) -> None:  # noqa: B027 - of the others no round lasts from step to step
        """Finish the pending round before the state is saved."""

    def round_to_resume(self, saved: int) -> int:
        """Return the number of completed rounds to resume from, given the checkpoint's number."""
        return saved

    def abort(self) -> None:  # noqa: B027 - of the others no round goes on by itself
        """Stop background rounds once all ranks have asked for it; collective."""

    def resume(self) -> None:  # noqa: B027 - as above
        """Restart background rounds after :meth:`abort`."""

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if not self._in_step:
            self._count_gradient(index)

    def _count_gradient(self, index: int) -> int:
        """Count a parameter's gradient; return its number of gradients in this pass."""
        count = self.backward_pass.count(index)
        if count == 1:
            self.accumulation.record(index)
        return count

    def synchronize(self) -> None:  # noqa: B027 - optional hook
        """Average gradients that are not averaged yet, before the step."""

    def on_zero_grad(self) -> None:  # noqa: B027 - optional hook
        """Handle a call of ``zero_grad()`` by the user."""

    def rebuild_if_changed(self) -> None:
        """Rebuild the buckets if the user has changed the set of parameters or their tensors.

        Groups may have been added; parameters may have been frozen, moved, cast or reassigned. All
        ranks must make the same changes.
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
        """Pass the averager the tensors that rounds average: one flat tensor per bucket."""
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
        self.copies.find(self.named_parameters)
        self.build_buckets()
        if self.needs_gradient_hooks:
            parameters = (parameter for _, parameter in self.named_parameters)
            self._gradient_hooks += hook_gradients(parameters, self._on_gradient)

    def _unify_copies(self) -> None:
        """Keep equal parts of parameters inside a replica equal, with the method's state."""
        for bucket in self.averager.buckets if self.copies.exist else ():
            views = zip(*bucket.state_views(), strict=True) if bucket.state else repeat(())
            parts = zip(bucket.names, bucket.parameters, views, strict=False)
            self.copies.unify((name, [local(one), *state]) for name, one, state in parts)

    def _start(self) -> None:
        """Build the buckets and register hooks, unless there are no rounds."""
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
        """Handle the begin of a forward pass."""

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Register a hook that detects when a backward pass reaches the model's output."""
        self.backward_pass.forget_failed()
        if torch.is_grad_enabled():
            self.backward_pass.hook(output)

    def _on_backward_end(self) -> None:  # noqa: B027 - optional
        """Handle the end of the outermost backward pass."""

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Switch to another topology."""
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
            if parameter.requires_grad and local(parameter).numel()
        ]
