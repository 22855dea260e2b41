"""Reducer that trains a model by any algorithm: backward passes end with an optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import finalize

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.algorithms.gradient_hooks import hook_gradients, remove_hooks
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.parallel.bucket_optimizer_state import collect_state, restore_state
from asyncddp.parallel.optimizer_buckets import (
    BucketUpdateConfig,
    NamedParameters,
    OptimizerBucket,
)
from asyncddp.parallel.reducer import TrainingObserver
from asyncddp.topology.builders import TopologyLike


class WholeModelBucket(OptimizerBucket):
    """All parameters of a model with one optimizer, which has buckets of its own to send."""

    @override
    def pack(self) -> None: ...

    @override
    def unpack(self) -> None: ...


class AlgorithmReducer:
    """Reducer of one model whose backward passes end with a step of a ``DistributedOptimizer``.

    Attributes:
        named_parameters: Names and parameters that are trained.
        buckets: One, of all parameters.
        optimizer: The distributed optimizer.
        training: Whether backward passes make steps.
        backward_pass: The backward pass under way.
        observer: Notified of updates and steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        named: NamedParameters,
        settings: MethodSettings,
        config: BucketUpdateConfig,
        tracer: NullTrainingTracer,
        steps: int = 0,
    ) -> None:
        self.named_parameters, self._config, self._tracer = named, config, tracer
        whole = WholeModelBucket(0, range(len(named)), named)
        whole.create_optimizer(config.optim_fn, config.lr_scheduler_fn)
        self.buckets: list[OptimizerBucket] = [whole]
        self.optimizer = DistributedOptimizer(
            whole.optimizer, model, **settings.arguments(), broadcast=False
        )
        self.optimizer._switcher.start_at(steps)
        self.observer: TrainingObserver | None = None
        self.training, self._accumulating = True, False
        self.backward_pass, self._step_open = BackwardPass(self._on_backward_end), False
        self._hooks: list[RemovableHandle] = []
        self._hooks += hook_gradients([one for _, one in named], self._on_gradient)
        finalize(self, remove_hooks, self._hooks).atexit = False

    @property
    def averager(self) -> ModelAverager:
        """The averager in use."""
        return self.optimizer._averager

    @property
    def accumulating(self) -> bool:
        """Whether gradients only accumulate for now."""
        return self._accumulating

    @accumulating.setter
    def accumulating(self, value: bool) -> None:
        self._accumulating = self.optimizer._phase.accumulation.held = value

    # a backward pass

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.training and not self.accumulating:
            self.backward_pass.begin()
            self._step_open = True

    def _on_backward_end(self) -> None:
        if self._step_open:
            self._step_open = False
            self._step()
            self._end_step()

    def _step(self) -> None:
        """Unscale, clip and update."""
        optimizer, scaler = self.optimizer, self._config.scaler
        optimizer.synchronize()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.observer is not None:
            self.observer.before_update(self.buckets[0])
        if self._config.grad_clip_norm > 0:
            parameters = [parameter for _, parameter in self.named_parameters]
            torch.nn.utils.clip_grad_norm_(parameters, self._config.grad_clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def _end_step(self) -> None:
        """Drop the gradients, and tell the scheduler and the observer."""
        self.optimizer.zero_grad()
        for bucket in self.buckets:
            if bucket.scheduler is not None:
                bucket.scheduler.step()
        if self.observer is not None:
            self.observer.after_step()

    def end_failed_step(self) -> None:
        """End the step of a backward pass that has failed half-way, so that other ranks go on.

        Where all ranks hold one model, it makes the step that the others make, with the gradients
        that there are; elsewhere it averages without an update.
        """
        self.backward_pass.forget_failed()
        if self.backward_pass.open or not self._step_open:
            return
        self._step_open = False
        if self.averager.algorithm.replicates_model:
            self.optimizer.step()
        else:
            self.optimizer._phase.step(lambda closure: None, None, scaled=False)
            self.optimizer._end_step()
        self._end_step()

    # around backward passes

    @property
    def steps(self) -> int:
        """Steps completed so far."""
        return self.optimizer.steps

    @property
    def state(self) -> dict[str, Any]:
        """State of the optimizer, the scheduler and the algorithm, by parameter name."""
        found = collect_state(self.buckets, self.averager.round)
        return {**found, "algorithm": self.optimizer.averaging_state}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.restart(averaged=False)
        restore_state(self.buckets[0], state)
        if "algorithm" in state:
            self.optimizer.averaging_state = state["algorithm"]

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Continue with the optimizer's and the scheduler's state of another algorithm."""
        restore_state(self.buckets[0], state)

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a parameter any more."""
        self.optimizer._phase.wait_for_reads()

    def average_pending(self) -> None:
        """Write all pending averages, ahead of their step."""
        self.optimizer._phase.conclude()

    def restart(self, *, averaged: bool) -> None:
        """Restart communication after the parameters of all ranks got new values; collective."""
        del averaged
        self.optimizer._phase.reset()
        self.averager.windows.reset()

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Use another topology from now on."""
        self.averager.set_topology(topology)

    def detach(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._hooks)
        self.optimizer._phase.detach()

    def close(self) -> None:
        """Wait until no neighbour reads the parameters, and free windows, which is collective."""
        self.optimizer._phase.conclude()
        self.wait_for_reads()
        self.optimizer.unregister_windows()
