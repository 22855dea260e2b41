"""Averaging after a step that is made on the parameters times p: the rhythm of push-sum."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.algorithms.rhythms.after_step import AfterStep
from asyncddp.algorithms.rhythms.base import Closure, Update

__all__ = ["AfterBiasedStep"]


class AfterBiasedStep(AfterStep):
    r"""The rhythm of ``push_sum``: parameters are :math:`z = x / p`, the optimizer steps on x.

    .. math:: x \leftarrow p z, \qquad x \leftarrow x - s\, U(g(z)), \qquad
              (x, p) \leftarrow \mathrm{mix}(x, p), \qquad z \leftarrow x / p

    with s by how much updates are scaled where ranks differ in speed.
    Gradients, those of closures too, are taken at z, which is what the parameters are outside of
    ``step()``: in forward passes, in evaluation and in checkpoints.
    """

    _biased = False

    def rebuild(self) -> None:
        """Make all buckets anew, with windows whose p is 1: from z, not from x."""
        if self._biased:
            self._unbias()
        super().rebuild()

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Bias, step, average, and take the bias away."""
        self.refresh()
        self._bias()
        try:
            return super().step(
                self._scaled(update),
                closure if closure is None else self._unbiased(closure),
                scaled=scaled,
            )
        finally:
            self._unbias()

    def _scaled(self, update: Update) -> Update:
        """The update, of which only a part counts, or a multiple."""
        scale = self.setting.mixer.step_scale
        if scale == 1.0:
            return update

        def scaled(closure: Closure | None) -> Any:
            """Update, and scale what that has changed."""
            before = [flat.clone() for flat in self.flats()]
            loss = update(closure)
            self.intact()  # the update may have assigned parameters anew
            with torch.no_grad():
                for flat, old in zip(self.flats(), before, strict=True):
                    flat.sub_(old).mul_(scale).add_(old)
            return loss

        return scaled

    def _unbiased(self, closure: Closure) -> Closure:
        """The closure, evaluated at z."""

        def evaluate() -> Any:
            """Evaluate the closure where the model holds z."""
            self._unbias()
            try:
                return closure()
            finally:
                self._bias()

        return evaluate

    def _bias(self) -> None:
        """Make x of z."""
        self._biased = True
        for bucket, p in zip(self.buckets, self.setting.mixer.windows.biases(), strict=True):
            if p != 1.0:
                bucket.flat.mul_(p)

    def _unbias(self) -> None:
        """Make z of x, with p as it is by now."""
        self.intact()  # the update may have assigned parameters anew
        if not self._biased:
            return
        self._biased = False
        for bucket, p in zip(self.buckets, self.setting.mixer.windows.biases(), strict=True):
            if p != 1.0:
                bucket.flat.div_(p)
