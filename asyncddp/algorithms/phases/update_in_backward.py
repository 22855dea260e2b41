"""Communication phase of ``update_in_backward``: updates and sends buckets in backward passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.phases.parameter_averaging import ParameterAveragingPhase
from asyncddp.errors import UsageError

_INSTEAD = "use update_in_backward=False, which makes the whole update in step()"


class UpdateInBackwardPhase(ParameterAveragingPhase):
    """Communication phase that updates and sends each bucket once its gradients are ready.

    It is used for methods that average after the step, with ``update_in_backward=True``: the user's
    optimizer steps, restricted to the bucket's parameters. ``step()`` updates and sends the rest,
    and writes the averages. Changing gradients between backward and ``step()`` is an error.
    """

    hooks_forward = True

    def __init__(self, config: PhaseConfig) -> None:
        super().__init__(config)
        self._ready_by_bucket: dict[int, set[int]] = {}
        self._updated_gradients: dict[int, tuple[torch.Tensor, int]] = {}

    @override
    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._ready_by_bucket:
            self.rebuild_if_changed()

    def build_buckets(self) -> None:
        """Make the parameters views in flat buckets, and index the buckets by parameter."""
        super().build_buckets()
        bucket_by_id = {
            id(parameter): bucket
            for bucket, content in enumerate(self.buckets)
            for parameter in content.parameters
        }
        self._bucket_of = [bucket_by_id[id(parameter)] for _, parameter in self.named_parameters]

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Count a gradient; update its bucket if all its gradients are ready."""
        again = self._count_gradient(index) > 1
        bucket = self._bucket_of[index]
        if index in self._updated_gradients or index in self._ready_by_bucket.get(bucket, ()):
            where = "in one backward pass" if again else "before step()"
            remedy = (
                "use checkpoint(..., use_reentrant=False)"
                if again
                else "give the number of backward passes per step() as num_steps_per_communication"
            )
            raise UsageError(
                f"parameter {self.named_parameters[index][0]} got another gradient {where}, but "
                f"with update_in_backward=True the one before was the last; {remedy}, or {_INSTEAD}"
            )
        if not self.accumulation.due():
            return
        ready = self._ready_by_bucket.setdefault(bucket, set())
        ready.add(index)
        if len(ready) == len(self.buckets[bucket].parameters):
            self._update(bucket)

    def _update(self, bucket: int) -> None:
        """Run the optimizer on one bucket's parameters, and send the bucket."""
        if not self._updated_gradients:
            self._begin_round()
        content = self.buckets[bucket]
        optimizer = self.config.optimizer
        with restricted_to(optimizer, {id(parameter) for parameter in content.parameters}):
            self.config.training_tracer.update(optimizer.step, bucket)()
        for index, (_, parameter) in enumerate(self.named_parameters):
            if self._bucket_of[index] == bucket and parameter.grad is not None:
                self._updated_gradients[index] = parameter.grad, parameter.grad._version
        content.read()
        if self._round is not None:
            self._round.start(bucket)

    def _begin_round(self) -> None:
        with torch.no_grad():
            fits = self.repair_buckets()
        if not fits:
            raise UsageError(
                "parameters were moved or cast between forward and backward; with "
                f"update_in_backward=True do that after step(), or {_INSTEAD}"
            )
        self._round = self.config.averager.begin_round()

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Update and send the remaining buckets, and write the averages."""
        if closure is not None:
            raise UsageError(
                f"step(closure) evaluates more than once and cannot update in backward; {_INSTEAD}"
            )
        if scaled:
            raise UsageError(
                f"GradScaler unscales gradients after backward, when they were used; {_INSTEAD}"
            )
        self._check_gradients_unchanged()
        return super().step(update, closure, scaled=scaled)

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        loss: Any = None
        if not self._updated_gradients:
            loss = update(None)
        else:
            updated = {id(self.named_parameters[index][1]) for index in self._updated_gradients}
            if rest := {id(parameter) for parameter in self.parameters()} - updated:
                with restricted_to(self.config.optimizer, rest):
                    update(None)
        if averaged:
            self._average()
        return loss

    @override
    def _leave_out_unused(self) -> None: ...  # buckets are sent before a pass shows what it uses

    def _average(self) -> None:
        if not self._updated_gradients:
            self._start_round()
        if self._round is not None:
            for index in range(len(self.buckets)):
                if not self._round.has_started(index):
                    self._round.start(index)
            self._round.finish()
            self._write_parts()

    def _check_gradients_unchanged(self) -> None:
        for index, (gradient, version) in self._updated_gradients.items():
            name, parameter = self.named_parameters[index]
            if parameter.grad is not gradient or gradient._version != version:
                raise UsageError(
                    f"the gradient of {name} was changed between backward and step() (clipped, "
                    "unscaled or zeroed), but with update_in_backward=True the update had used it "
                    f"already; {_INSTEAD}"
                )

    @override
    def _end_step(self, *, averaged: bool) -> None:
        self._round = None
        self._ready_by_bucket, self._updated_gradients = {}, {}
        super()._end_step(averaged=averaged)

    def conclude(self) -> None:
        """Finish the round of a backward pass without a following step."""
        if self._updated_gradients:
            self._average()
            self._end_step(averaged=True)


@contextmanager
def restricted_to(optimizer: torch.optim.Optimizer, chosen: Collection[int]) -> Iterator[None]:
    """Restrict an optimizer to the parameters with given ids, inside a ``with`` block.

    Changes to its groups' options are kept.
    """
    groups = optimizer.param_groups
    parts = [{**g, "params": [p for p in g["params"] if id(p) in chosen]} for g in groups]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        yield
    finally:
        for group, part in zip(groups, parts, strict=True):
            group.update({key: value for key, value in part.items() if key != "params"})
        optimizer.param_groups = groups
