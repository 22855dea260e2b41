"""Tracing of a training loop in the timeline: steps, passes, modules and optimizer updates.

Passes of the whole model are traced in every step, passes of its modules only in some steps, so
that tracing takes at most a fixed share of the time: a span costs some microseconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from typing_extensions import override

from asyncddp.algorithms.gradient_hooks import WeakMethodHook
from asyncddp.algorithms.span_recorders import (
    BackwardSpanRecorder,
    ForwardSpanRecorder,
    has_compiled,
    module_tracing_cost,
)
from asyncddp.context import Context
from asyncddp.timeline.tracer import Tracer
from asyncddp.timeline.tracks import COMPUTATION

_SHARE = 0.01
"""Maximum share of time for tracing modules, on average."""
_FIRST = 2  # the first step whose modules are traced, whatever that costs
_backward_tracers: WeakValueDictionary[Tracer, BackwardSpanRecorder] = WeakValueDictionary()
_REMEMBERED = 8  # durations of steps that are kept


def tracer_for(context: Context, models: Sequence[torch.nn.Module]) -> NullTrainingTracer:
    """Create the tracer of a training loop; it records nothing if the timeline is off."""
    tracer = context.tracer
    return NullTrainingTracer() if tracer is None else TrainingTracer(tracer, models)


class NullTrainingTracer:
    """Training tracer that records nothing, for the timeline switched off; base class of tracers.

    Attributes:
        enabled: Whether spans are recorded; None without a timeline.
    """

    enabled: bool | None = None

    def attach_hooks(self, models: Sequence[torch.nn.Module]) -> None:
        """Register hooks on the models' forward passes, after all existing hooks."""

    def update(self, step: Callable[..., Any], bucket: int | None = None) -> Callable[..., Any]:
        """Wrap an optimizer's step, for one bucket or all parameters, to record each call."""
        return step

    def end_step(self) -> None:
        """Record the end of a step and the begin of the next one."""


class TrainingTracer(NullTrainingTracer):
    """Tracer of one wrapper's training loop: records steps, passes and updates in the timeline.

    A step lasts from the end of one ``optimizer.step()`` to the end of the next; the first step
    begins with the first forward pass. If a rank has several wrappers, only steps of the first one
    are recorded, since steps of two would overlap.

    Attributes:
        module_interval: Modules are traced in every ``module_interval``-th step.
    """

    def __init__(self, tracer: Tracer, models: Sequence[torch.nn.Module]) -> None:
        self._tracer = tracer
        self._records_steps = tracer.claim("steps", self)
        self.steps = self.module_interval = 0
        self.enabled = True
        self._step_start: int | None = None
        self._cost = 0.0
        self._step_durations: deque[int] = deque(maxlen=_REMEMBERED)
        self._backward_tracer = _backward_tracers.setdefault(tracer, BackwardSpanRecorder(tracer))
        self._forward_tracers = [
            ForwardSpanRecorder(tracer, model, self._backward_tracer) for model in models
        ]

    @override
    def attach_hooks(self, models: Sequence[torch.nn.Module]) -> None:
        self._cost = module_tracing_cost()
        for model, one in zip(models, self._forward_tracers, strict=True):
            model.register_forward_pre_hook(WeakMethodHook(self._begin_forward, one))
            model.register_forward_hook(WeakMethodHook(self._end_forward, one))

    # passes

    def _begin_forward(
        self, forward_tracer: ForwardSpanRecorder, model: torch.nn.Module, *passed: Any
    ) -> None:
        if not self.enabled:
            return
        if self._step_start is None:
            self._step_start = time.monotonic_ns()
        forward_tracer.begin(model, modules=self._traces_modules)

    def _end_forward(self, forward_tracer: ForwardSpanRecorder, *passed: Any) -> None:
        forward_tracer.end(passed[-1])

    @property
    def _traces_modules(self) -> bool:
        if has_compiled():
            return False
        interval = self.module_interval
        return self.steps == _FIRST or (interval > 0 and self.steps % interval == 0)

    # updates and steps

    @override
    def update(self, step: Callable[..., Any], bucket: int | None = None) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic_ns()
            with self._tracer.profiler_range("optimizer"):
                result = step(*args, **kwargs)
            facts = None if bucket is None else {"bucket": bucket}
            now = time.monotonic_ns()
            if self.enabled:
                self._tracer.record_span("optimizer", "optimizer", start, now, facts, COMPUTATION)
            return result

        return traced

    @override
    def end_step(self) -> None:
        self._backward_tracer.end()
        now, start = time.monotonic_ns(), self._step_start
        traced = sum(one.traced_module_count for one in self._forward_tracers)
        if start is not None and self._records_steps and self.enabled:
            facts = {"step": self.steps, "modules": traced > 0}
            self._tracer.record_span("step", "step", start, now, facts, COMPUTATION)
        if start is not None and not traced and self.steps:
            self._step_durations.append(now - start)
        if traced and self._step_durations:
            self._choose_module_interval(traced)
        for one in self._forward_tracers:
            one.traced_module_count = 0
        self.steps += 1
        self._step_start = now if self.enabled else None

    def _choose_module_interval(self, modules: int) -> None:
        """Choose the interval of steps with traced modules: a power of two, so that ranks agree."""
        each = self._cost + 2 * self._tracer.cost * 1e9
        share = modules * each / (_SHARE * min(self._step_durations))
        every = 1
        while every < share:
            every *= 2
        if every != self.module_interval:
            self.module_interval = every
            facts = {"every": every, "modules": modules, "cost": round(modules * each / 1e3, 3)}
            self._tracer.record_metadata("asyncddp.modules", facts, time.monotonic_ns())
