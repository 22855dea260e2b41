"""What a training loop computes, noted in the timeline: steps, passes, modules, updates.

The pass of the whole model is noted in every step. Its modules are noted in so many steps that the
notes take no more than a fixed share of the time: each costs some microseconds, whatever the module
computes, so that all steps of large modules are noted, and few of many small ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncddp.algorithms.recorded_passes import Backward, Passing, compiles, cost_of_module
from asyncddp.algorithms.rhythms.hooks import Weakly
from asyncddp.context import Context
from asyncddp.timeline.recorder import Recorder
from asyncddp.timeline.tracks import COMPUTATION

__all__ = ["Training", "training_of"]

_SHARE = 0.01
"""Of the time of a step, what its modules' notes may take on average."""
_FIRST = 2  # the first step whose modules are noted, whatever they cost
_REMEMBERED = 8  # steps


def training_of(context: Context, models: Sequence[torch.nn.Module]) -> Training | None:
    """What takes notes of a training loop; None where there is no timeline."""
    return None if context.recorder is None else Training(context.recorder, models)


class Training:
    """Takes notes of one wrapper's training loop.

    A step lasts from the end of one ``optimizer.step()`` to the end of the next; the first begins
    with the first forward pass. Of several wrappers in one rank only the first one's steps are
    noted, since steps of two would overlap.

    Args:
        recorder: Takes the notes.
        models: What is trained.

    Attributes:
        every: In which steps modules are noted: those whose number is a multiple.
        listening: Whether notes are taken.
    """

    def __init__(self, recorder: Recorder, models: Sequence[torch.nn.Module]) -> None:
        self._recorder = recorder
        self._leads = recorder.claim("steps", self)
        self.steps, self.every, self.listening = 0, 0, True
        self._began: int | None = None
        self._cost = 0.0
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        self._backward = Backward.of(recorder)
        self._passes = [Passing(recorder, model, self._backward) for model in models]

    def listen(self) -> None:
        """Hear of forward passes, after all who have asked to before."""
        self._cost = cost_of_module()
        for one in self._passes:
            one.model.register_forward_pre_hook(Weakly(self._forward, one))
            one.model.register_forward_hook(Weakly(self._forwarded, one))

    # passes

    def _forward(self, passing: Passing, module: torch.nn.Module, args: Any) -> None:
        del module, args
        if not self.listening:
            return
        if self._began is None:
            self._began = time.monotonic_ns()
        passing.begin(modules=self._notes_modules)

    def _forwarded(self, passing: Passing, module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args
        passing.end(output)

    @property
    def _notes_modules(self) -> bool:
        if compiles():
            return False
        return self.steps == _FIRST or (self.every > 0 and self.steps % self.every == 0)

    # updates and steps

    def update(self, step: Callable[..., Any], bucket: int | None = None) -> Callable[..., Any]:
        """A function that makes a step of the user's optimizer, and notes it.

        Args:
            step: The optimizer's.
            bucket: Of which bucket, where that is not all.
        """

        def noted(*args: Any, **kwargs: Any) -> Any:
            """Call it, and note how long that took."""
            begun = time.monotonic_ns()
            with self._recorder.shown("optimizer"):
                result = step(*args, **kwargs)
            facts = None if bucket is None else {"bucket": bucket}
            now = time.monotonic_ns()
            if self.listening:
                self._recorder.span("optimizer", "optimizer", begun, now, facts, COMPUTATION)
            return result

        return noted

    def step_ended(self) -> None:
        """A step has ended, and the next one begins."""
        self._backward.end()
        now, began = time.monotonic_ns(), self._began
        noted = sum(one.modules_noted for one in self._passes)
        if began is not None and self._leads and self.listening:
            facts = {"step": self.steps, "modules": noted > 0}
            self._recorder.span("step", "step", began, now, facts, COMPUTATION)
        if began is not None and not noted and self.steps:
            self._lengths.append(now - began)
        if noted and self._lengths:
            self._pace(noted)
        for one in self._passes:
            one.modules_noted = 0
        self.steps += 1
        self._began = now if self.listening else None

    def _pace(self, modules: int) -> None:
        """Decide how often modules are noted; a power of two, so that ranks agree about steps."""
        each = self._cost + 2 * self._recorder.cost * 1e9
        share = modules * each / (_SHARE * min(self._lengths))
        every = 1
        while every < share:
            every *= 2
        if every != self.every:
            self.every = every
            facts = {"every": every, "modules": modules, "cost": round(modules * each / 1e3, 3)}
            self._recorder.fact("asyncddp.modules", facts, time.monotonic_ns())
