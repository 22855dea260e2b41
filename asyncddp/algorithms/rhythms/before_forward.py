"""Averaging that starts with the forward pass and is taken just before the optimizer's step."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.algorithms.mixer import Round
from asyncddp.algorithms.rhythms.base import Closure, ParameterRhythm, Setting, Update
from asyncddp.algorithms.rhythms.hooks import Weakly
from asyncddp.errors import UsageError

__all__ = ["BeforeForward"]


class BeforeForward(ParameterRhythm):
    """The rhythm of ``adapt_with_combine``: communication hides behind forward and backward.

    The first training forward after a step starts the round; where there was none, ``step()``
    does. A forward after ``zero_grad()`` with neither backward nor step in between means that the
    user has skipped a step: the round under way is taken first, so that neighbours need not wait.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._round: Round | None = None
        self._versions: list[list[int]] | None = None
        self._seen = False
        self._discarded = False
        if not setting.mixer.silent:
            for model in setting.models:
                self._bells.append(model.register_forward_pre_hook(Weakly(self._forward)))

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if self._stepping or not (module.training and torch.is_grad_enabled()):
            return
        if self._discarded:
            self._skip()
        self._seen = True
        ended = self.setting.mixer.context.engine.closed  # the model goes on without its optimizer
        if self._round is None and not ended and self._wanted():
            self._start()

    def _wanted(self) -> bool:
        """Whether a round that is not under way starts with this forward pass."""
        return self.passes.due(more=1)

    def _skip(self) -> None:
        """The user has skipped a step."""
        self._end(averaged=self._install())

    def gradient_ready(self, index: int) -> None:
        """Count it; what came before is part of the step to come."""
        super().gradient_ready(index)
        self._discarded = False

    def zeroed(self) -> None:
        """A forward pass that was seen has been discarded, unless a backward pass follows."""
        self._discarded = self._seen

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Take the average, then step."""
        del scaled
        averaged = self._round is not None or self.passes.due()
        self._stepping = True
        try:
            if averaged and self._round is None:
                self._start()
            if closure is None:
                self._install()
                loss = update(None)
            else:
                loss = update(self._then_install(closure))
                self._install()
        finally:
            self._stepping = False
        self._end(averaged=averaged)
        return loss

    def _then_install(self, closure: Closure) -> Closure:
        """The closure, after whose first evaluation the average is taken."""

        def evaluate() -> Any:
            """Evaluate the closure, and take the average after its first pass."""
            loss = closure()
            self._install()
            return loss

        return evaluate

    def _start(self) -> None:
        self.refresh()
        self._round = self.setting.mixer.begin()
        if self._round is not None:
            self._versions = [bucket.versions() for bucket in self.buckets]
            for index, bucket in enumerate(self.buckets):
                self._round.start(index, bucket.flat)

    def _install(self) -> bool:
        """Take the average, if one is under way; whether one was."""
        under_way, self._round = self._round, None
        if under_way is None:
            return False
        under_way.install(self._unchanged)
        return True

    def _unchanged(self, index: int) -> None:
        """Insist that nobody has written into a bucket while it was being sent."""
        bucket = self.buckets[index]
        changed = bucket.strangers()
        if self._versions is not None:
            pairs = zip(bucket.versions(), self._versions[index], strict=True)
            changed += [place for place, (now, then) in enumerate(pairs) if now != then]
        if changed:
            raise UsageError(
                f"parameter {bucket.names[changed[0]]} was changed between the forward pass and "
                "step(), while it was being averaged with the neighbours'; change parameters after "
                "step(), or use algorithm='adapt_then_combine', which averages inside step()"
            )

    def _end(self, *, averaged: bool) -> None:
        self.passes.end(averaged=averaged)
        self._seen = self._discarded = False

    def conclude(self) -> None:
        """Take the average of a forward pass that no step has followed."""
        if self._round is not None:
            self._end(averaged=self._install())

    def settle(self) -> None:
        """Wait for the round under way; its result is kept."""
        if self._round is not None:
            self._round.settle()
            for index in range(len(self.buckets)):
                self._unchanged(index)
            self._versions = None

    def forget(self) -> None:
        """Drop the round under way."""
        if self._round is not None:
            self._round.settle()
        self._round = None
        self._end(averaged=True)
