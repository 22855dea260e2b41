"""Reducer: in the backward pass it averages each bucket of parameters, updates and sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import finalize

import torch

from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.algorithms.gradient_hooks import claim_parameters, hook_gradients, remove_hooks
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.errors import UsageError
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.parallel.bucket_averager import BucketAverager
from asyncddp.parallel.bucket_optimizer_state import collect_state, restore_state
from asyncddp.parallel.optimizer_buckets import (
    BucketUpdateConfig,
    NamedParameters,
    OptimizerBucket,
    build_buckets,
)
from asyncddp.topology.builders import TopologyLike


class TrainingObserver(Protocol):
    """Interface of observers, such as a monitor, that are told of a model's updates and steps."""

    def before_update(self, bucket: OptimizerBucket) -> None:
        """Handle that the optimizer of a bucket is about to use its gradients."""

    def after_step(self) -> None:
        """Handle that a step was completed."""


class Reducer:
    """Reducer of one model: averages and updates each bucket once its gradients are ready.

    Each backward pass makes one step. The order of gradients is recorded in the first pass; at its
    end the buckets are created, and its step is made. From then on a bucket makes its step as soon
    as all its gradients are ready; buckets whose gradients are not all ready by the end of the pass
    make theirs then, as all buckets do where the update needs all gradients.

    Attributes:
        buckets: The buckets; none before the end of the first pass.
        training: Whether backward passes make steps.
        accumulating: Whether gradients only accumulate for now.
        backward_pass: The backward pass under way.
        observer: Notified of updates and steps.
    """

    def __init__(
        self,
        named: NamedParameters,
        bucket_averager: BucketAverager,
        config: BucketUpdateConfig,
        tracer: NullTrainingTracer,
    ) -> None:
        self.named_parameters, self.bucket_averager = named, bucket_averager
        self._config, self._tracer = config, tracer
        self.buckets: list[OptimizerBucket] = []
        self.observer: TrainingObserver | None = None
        self.training, self.accumulating = True, False
        self._gradient_counts: dict[int, int] = {}
        """How many gradients each parameter got in the first pass, in the order of their last."""
        self.backward_pass, self._step_open = BackwardPass(self._on_backward_end), False
        self._bucket_of: dict[int, OptimizerBucket] = {}
        self._missing_gradients: list[dict[int, int]] = []
        self._stepped_buckets: set[int] = set()
        self._pending_state: dict[str, Any] | None = None
        parameters = [parameter for _, parameter in named]
        self._hooks = hook_gradients(parameters, self._on_gradient)
        finalize(self, remove_hooks, self._hooks).atexit = False
        claim_parameters(parameters, self)

    # a backward pass

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if not self.training or self.accumulating:
            return
        self.backward_pass.begin()
        if not self.buckets:
            self._step_open = True
            self._gradient_counts[index] = self._gradient_counts.pop(index, 0) + 1
            return
        if not self._step_open:
            self._begin_step()
        if not self._config.updates_together:
            self._count_gradient(index)

    def _begin_step(self) -> None:
        self._step_open, self._stepped_buckets = True, set()
        counts = self._gradient_counts
        self._missing_gradients = [
            {index: counts.get(index, 1) for index in bucket.members} for bucket in self.buckets
        ]
        self.bucket_averager.begin_step()

    def _count_gradient(self, index: int) -> None:
        """Count a gradient, and make the step of its bucket if that was the last one."""
        bucket = self._bucket_of[index]
        if bucket.index in self._stepped_buckets:
            raise UsageError(
                f"parameter {self.named_parameters[index][0]} got another gradient after its "
                "update in the same backward pass, which it did not in the first; use "
                "checkpoint(..., use_reentrant=False), or a grad_clip_norm, which updates at the "
                "end of the pass"
            )
        missing = self._missing_gradients[bucket.index]
        left = missing.pop(index, 1) - 1
        if left:
            missing[index] = left
        if not missing:
            self._step_bucket(bucket, update=True)

    def _step_bucket(self, bucket: OptimizerBucket, *, update: bool) -> None:
        r"""Make the step of one bucket: :math:`x \leftarrow (W x) - u`, then publish it."""
        self.bucket_averager.average(bucket)
        if update and self.observer is not None and not self._config.updates_together:
            self.observer.before_update(bucket)
        step = self._tracer.update(bucket.step, bucket.index) if update else bucket.step
        step(update=update)
        self.bucket_averager.publish(bucket)
        self._stepped_buckets.add(bucket.index)

    def _step_remaining(self, *, update: bool) -> None:
        for bucket in self.buckets:
            if bucket.index not in self._stepped_buckets:
                self._step_bucket(bucket, update=update)

    def _on_backward_end(self) -> None:
        if not self._step_open:
            return
        if not self.buckets:
            self._build_buckets()
            self._begin_step()
        if self._config.updates_together:
            self._update_all()
        self._step_remaining(update=True)
        self._end_step()

    def _end_step(self) -> None:
        self._step_open = False
        self.bucket_averager.end_step()
        if self.observer is not None:
            self.observer.after_step()
        self._tracer.end_step()

    def _update_all(self) -> None:
        """Unscale, clip and update all buckets together, or none of them."""
        scaler, limit = self._config.scaler, self._config.grad_clip_norm
        parameters: list[torch.Tensor] = [parameter for _, parameter in self.named_parameters]
        combined: Any = SimpleNamespace(  # an optimizer, as far as GradScaler is concerned
            param_groups=[{"params": parameters}], step=partial(self._step_remaining, update=True)
        )
        if scaler is not None:
            scaler.unscale_(combined)
        if self.observer is not None:
            for bucket in self.buckets:  # before anything is clipped
                self.observer.before_update(bucket)
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        if scaler is not None:
            scaler.step(combined)
            scaler.update()
            self._step_remaining(update=False)

    def end_failed_step(self) -> None:
        """End the step of a backward pass that has failed half-way, so that neighbours go on.

        Its gradients are dropped; buckets that were not updated are averaged all the same.
        """
        self.backward_pass.forget_failed()
        if self.backward_pass.open or not self._step_open:
            return
        if not self.buckets:
            self._gradient_counts.clear()
        self._step_remaining(update=False)
        for _, parameter in self.named_parameters:
            parameter.grad = None
        self._step_open = False
        if self.buckets:
            self._end_step()

    # the buckets

    def _build_buckets(self) -> None:
        """Create the buckets in the recorded order of gradients; collective."""
        named, averager = self.named_parameters, self.bucket_averager.averager
        require_equal_on_all_ranks(
            averager.context,
            "DecentralizedDataParallel needs gradients in the same order on all ranks",
            describe_ready_order(self._gradient_counts, [name for name, _ in named]),
        )
        unused = [index for index in range(len(named)) if index not in self._gradient_counts]
        parts = [list(self._gradient_counts), unused]
        buckets = build_buckets(named, parts, self._config, averager.tensor_factory)
        if self._pending_state is not None:
            for bucket in buckets:
                restore_state(bucket, self._pending_state)
        self.bucket_averager.register_buckets(buckets)
        for bucket in buckets:
            self._bucket_of.update(dict.fromkeys(bucket.members, bucket))
        self.buckets, self._pending_state = buckets, None

    # around backward passes

    @property
    def averager(self) -> ModelAverager:
        """The averager of the buckets."""
        return self.bucket_averager.averager

    @property
    def steps(self) -> int:
        """Steps completed so far."""
        return self.averager.round

    @property
    def state(self) -> dict[str, Any]:
        """State of all optimizers and schedulers, by parameter name."""
        if self._pending_state is not None:
            return self._pending_state
        return collect_state(self.buckets, self.bucket_averager.averager.round)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.bucket_averager.averager.round = int(state["step"])
        if not self.buckets:
            self._pending_state = state
        for bucket in self.buckets:
            restore_state(bucket, state)
        self.restart(averaged=False)

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a parameter any more."""
        self.bucket_averager.wait_for_reads()

    def average_pending(self) -> None:
        """Write all pending averages, ahead of their step."""
        self.bucket_averager.average_pending()

    def restart(self, *, averaged: bool) -> None:
        """Restart communication after the parameters of all ranks got new values; collective."""
        self.bucket_averager.restart(averaged=averaged)

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Use another topology from now on; collective where buckets go through windows."""
        self.bucket_averager.set_topology(topology)

    def close(self) -> None:
        """Wait until no neighbour reads the parameters, and free windows, which is collective."""
        self.bucket_averager.close()

    def detach(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._hooks)


def describe_ready_order(counts: Mapping[int, int], names: Sequence[str]) -> list[str]:
    """Describe in which order parameters got how many gradients, which all ranks compare.

    Example:
        >>> describe_ready_order({0: 1, 2: 2}, ["a", "b", "c"])[1:]
        ['the 2nd gradient of all for c, which got 2', 'no gradient for b']
    """
    found = []
    for position, (parameter, times) in enumerate(counts.items(), start=1):
        teen = position % 100 in (11, 12, 13)
        ending = "th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th")
        more = f", which got {times}" if times > 1 else ""
        found.append(f"the {position}{ending} gradient of all for {names[parameter]}{more}")
    return found + [f"no gradient for {name}" for i, name in enumerate(names) if i not in counts]
