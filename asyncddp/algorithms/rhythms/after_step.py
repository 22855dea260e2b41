"""Averaging after the optimizer's step."""

from __future__ import annotations

from typing import Any

from asyncddp.algorithms.rhythms.base import Closure, ParameterRhythm, Setting, Update

__all__ = ["AfterStep"]


class AfterStep(ParameterRhythm):
    """The rhythm of ``adapt_then_combine``.

    The optimizer steps as it always does, so that clipping, scaling, accumulation and closures
    are right by construction; then all buckets are sent at once, and taken as they come.
    """

    def __init__(self, setting: Setting) -> None:
        self.listens = setting.every > 1
        super().__init__(setting)

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Step, then average."""
        del scaled
        averaged = self.passes.due()
        self._stepping = True
        try:
            loss = update(closure)
        finally:
            self._stepping = False
        if averaged:
            self._average()
        self.passes.end(averaged=averaged)
        return loss

    def _average(self) -> None:
        self.refresh()
        under_way = self.setting.mixer.begin()
        if under_way is not None:
            for index, bucket in enumerate(self.buckets):
                under_way.start(index, bucket.flat)
            under_way.install()

    def settle(self) -> None:
        """Nothing is under way between steps."""

    def forget(self) -> None:
        """Start counting anew."""
        self.passes.end(averaged=True)
