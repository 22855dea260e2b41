"""Reducers: update and average a model in each backward pass, through gradient hooks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch
from typing_extensions import override

from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.algorithms.gradient_hooks import claim_parameters, hook_gradients, remove_hooks
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import CommunicationPhase
from asyncddp.algorithms.phases.backward_averaging import BackwardAveragingPhase
from asyncddp.algorithms.phases.optimizer_buckets import (
    BucketUpdateConfig,
    NamedParameters,
    OptimizedParameters,
    TrainingObserver,
)
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.parallel.bucket_optimizer_state import collect_state, restore_state
from asyncddp.topology.builders import TopologyLike


class Reducer:
    """Reducer of one model: updates and averages its buckets in each backward pass.

    Attributes:
        named_parameters: Names and tensors of the trained parameters.
        optimizer: The distributed optimizer that makes the steps, or None.
        training: Whether backward passes make steps.
        accumulating: Whether gradients only accumulate for now.
        backward_pass: The backward pass in progress.
        observer: Notified of updates and steps.
    """

    optimizer: DistributedOptimizer | None = None
    training = True
    observer: TrainingObserver | None = None
    accumulating = _step_open = False
    _pending_state: dict[str, Any] | None = None

    def __init__(
        self,
        named: NamedParameters,
        config: BucketUpdateConfig,
        phase: BackwardAveragingPhase | None = None,
    ) -> None:
        self.named_parameters, self._config = named, config
        self._parameters: list[torch.Tensor] = [parameter for _, parameter in named]
        self.backward_pass = BackwardPass(self._on_backward_end)
        self._hooks = hook_gradients(self._parameters, self._on_gradient)
        finalize(self, remove_hooks, self._hooks).atexit = False
        if phase is not None:
            self._own_phase = phase
            claim_parameters(self._parameters, self)

    @property
    def phase(self) -> CommunicationPhase:
        """The communication phase in use."""
        return self._own_phase

    @property
    def averager(self) -> ModelAverager:
        """The averager in use."""
        return self.phase.averager

    @property
    def buckets(self) -> Sequence[OptimizedParameters]:
        """Buckets, each with its own optimizer; empty before the end of the first backward pass."""
        return self._own_phase.buckets

    def accumulate(self, enable: bool) -> None:
        """Start or stop accumulating gradients without a step."""
        self.accumulating = enable

    # a backward pass

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.training and not self.accumulating:
            self.backward_pass.begin()
            first, self._step_open = not self._step_open, True
            self._count_gradient(index, first=first)

    def _count_gradient(self, index: int, *, first: bool) -> None:
        """Tell the phase that a gradient is ready, and whether it is the first of the step."""
        self._own_phase.observer = self.observer
        self._own_phase.count_gradient(index, first=first)

    def _on_backward_end(self) -> None:
        if self._step_open:
            self._step()
            self._end_step()

    def _step(self) -> None:
        """Update and average the remaining buckets at the end of a backward pass."""
        every = SimpleNamespace(  # an optimizer, as far as GradScaler is concerned
            param_groups=[{"params": self._parameters}],
            step=partial(self._own_phase.step_remaining, update=True),
        )
        self.phase.step(lambda closure: self._update_together(every), None, scaled=False)

    def _update_together(self, optimizer: Any) -> None:
        """Unscale and clip all gradients, then step the optimizer if the scaler allows it."""
        scaler, limit = self._config.scaler, self._config.grad_clip_norm
        if scaler is not None:
            scaler.unscale_(optimizer)
            self._agree_on_infinities(scaler, optimizer)
        if self.observer is not None:
            for bucket in self.buckets:  # before anything is clipped
                self.observer.before_update(bucket)
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def _agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Let all ranks of a sharded replica skip the step, and scale alike, if one has to."""
        inner = self.averager.inner
        if inner is not None:
            found = scaler._found_inf_per_device(optimizer).values()
            infinite = inner.agree(any(map(bool, found)))
            for one in found:
                one.fill_(float(infinite))

    def _end_step(self) -> None:
        """Notify the observer that a step has ended."""
        self._step_open = False
        if self.observer is not None:
            self.observer.after_step()

    def end_failed_step(self) -> None:
        """End the step of a failed backward pass, so that other ranks do not wait for it."""
        self.backward_pass.forget_failed()
        if self._step_open and not self.backward_pass.open:
            self._end_failed()

    def _end_failed(self) -> None:
        """Average the buckets that were not updated, and drop all gradients."""
        began = self._own_phase.end_failed_step()
        for parameter in self._parameters:
            parameter.grad = None
        self._step_open = False
        if began:
            self._own_phase.end_step()
            self._end_step()

    # around backward passes

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self.averager.round

    @property
    def state(self) -> dict[str, Any]:
        """State of all optimizers and schedulers, keyed by parameter name."""
        if self._pending_state is not None and not self.buckets:
            return self._pending_state
        return collect_state(self.buckets, self.averager.round)

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state that :attr:`state` returned, and restart communication."""
        self.averager.round = int(state["step"])
        if not self.buckets:
            self._pending_state = state
            self._own_phase.restore = partial(restore_state, saved=state)
        for bucket in self.buckets:
            restore_state(bucket, state)
        self.restart(averaged=False)

    def wait_for_reads(self) -> None:
        """Wait until no message and no peer reads a parameter; pending averages are kept."""
        self.phase.wait_for_reads()

    def conclude(self) -> None:
        """Write all pending averages now, before the step that they belong to."""
        self.phase.conclude()

    def restart(self, *, averaged: bool) -> None:
        """Restart communication after the parameters of all ranks were replaced; collective."""
        self._own_phase.reset(averaged=averaged)

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Replace the topology; collective if buckets are sent through windows."""
        self.phase.set_topology(topology)

    def detach(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._hooks)
        self.phase.detach()

    def close(self) -> None:
        """Wait until no neighbour reads the parameters, and free windows (collectively)."""
        self.phase.close()


class AlgorithmReducer(Reducer):
    """Reducer that makes a ``DistributedOptimizer`` step at the end of each backward pass."""

    optimizer: DistributedOptimizer

    def __init__(
        self,
        model: torch.nn.Module,
        named: NamedParameters,
        settings: MethodSettings,
        config: BucketUpdateConfig,
        steps: int = 0,
    ) -> None:
        self._whole = OptimizedParameters(named)
        self._whole.create_optimizer(config.optim_fn, config.lr_scheduler_fn)
        self.optimizer = DistributedOptimizer(
            self._whole.optimizer, model, **settings.arguments(), broadcast=False
        )
        self.optimizer._switcher.start_at(steps)
        super().__init__(named, config)

    @property
    @override
    def phase(self) -> CommunicationPhase:
        return self.optimizer._phase

    @property
    @override
    def buckets(self) -> Sequence[OptimizedParameters]:
        return [self._whole]

    @override
    def accumulate(self, enable: bool) -> None:
        self.accumulating = self.phase.accumulation.held = enable

    @override
    def _count_gradient(self, index: int, *, first: bool) -> None: ...  # the phase has hooks

    @override
    def _step(self) -> None:
        self._step_open = False
        self.optimizer.synchronize()
        self._update_together(self.optimizer)

    @override
    def _end_step(self) -> None:
        """Drop the gradients, step the scheduler, and notify the observer."""
        self.optimizer.zero_grad()
        if self._whole.scheduler is not None:
            self._whole.scheduler.step()
        super()._end_step()

    @override
    def _end_failed(self) -> None:
        """Step with the gradients so far if all ranks hold the same model, else only average."""
        self._step_open = False
        if self.averager.algorithm.replicates_model:
            self.optimizer.step()
        else:
            self.phase.step(lambda closure: None, None, scaled=False)
            self.optimizer._end_step()
        self._end_step()

    @property
    @override
    def steps(self) -> int:
        return self.optimizer.steps

    @property
    @override
    def state(self) -> dict[str, Any]:
        """State of the optimizer, the scheduler and the algorithm, by parameter name."""
        return {**super().state, "algorithm": self.optimizer.averaging_state}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        self.restart(averaged=False)
        restore_state(self._whole, state)
        if "algorithm" in state:
            self.optimizer.averaging_state = state["algorithm"]

    @override
    def restart(self, *, averaged: bool) -> None:
        self.phase.reset()
        self.averager.windows.reset()
