"""Communication phases that average parameters after the optimizer's step, also by push-sum."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.phases.parameter_averaging import ParameterAveragingPhase
from asyncddp.errors import NotInitializedError, PeerError


class AfterStepPhase(ParameterAveragingPhase):
    """Communication phase that averages parameters after the optimizer's step.

    The optimizer steps as without the wrapper, so that clipping, scaling, accumulation and closures
    work unchanged; then all buckets are sent at once. They are averaged at the end of this step, or
    ``delay`` steps later, as the method declares. A hidden round then begins, if it has any; in
    elastic runs it blocks, too, since a neighbour may die before its message is waited for.
    """

    def __init__(self, config: PhaseConfig) -> None:
        self.needs_gradient_hooks = config.passes_per_round > 1
        super().__init__(config)

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        loss, method = update(closure), self.config.averager.algorithm
        delay, context = method.delay, self.config.averager.context
        if averaged:
            self.conclude()
            self._start_round()
            if method.hidden_rounds:
                self.conclude()
                self._start_round()
            if self._round is not None and (delay or method.hidden_rounds):
                context.exit_callbacks.append(self._wait_at_exit)
        steps = 0 if averaged else self.accumulation.carried_passes + 1
        hidden = method.hidden_rounds and context.engine.membership is None
        if steps == delay and not hidden:
            self.conclude()
            if delay:
                self.rebuild_if_changed()
        return loss

    @override
    def conclude(self) -> None:
        pending_round, self._round = self._round, None
        if pending_round is not None:
            self._forget_exit()
            pending_round.finish()
            self._write_parts()

    @override
    def reset(self) -> None:
        self._forget_exit()
        super().reset()

    def _wait_at_exit(self) -> None:
        """Wait for the messages of an unfinished round, which peers need, too."""
        with suppress(PeerError, NotInitializedError):
            self.wait_for_reads()

    def _forget_exit(self) -> None:
        callbacks = self.config.averager.context.exit_callbacks
        if self._wait_at_exit in callbacks:
            callbacks.remove(self._wait_at_exit)

    @override
    def settle(self) -> None:
        self.conclude()


class PushSumPhase(AfterStepPhase):
    r"""Communication phase of ``push_sum``: averages parameters scaled by push-sum weights.

    .. math:: x \leftarrow p z, \qquad x \leftarrow x - s\, U(g(z)), \qquad
              (x, p) \leftarrow \mathrm{mix}(x, p), \qquad z \leftarrow x / p

    with p the push-sum weight, and s the scale of updates for ranks of different speed. Gradients,
    also of closures, are computed at z. Outside of ``step()`` the parameters hold z: in forward
    passes, in evaluation and in checkpoints.
    """

    _biased = False

    def rebuild(self) -> None:
        """Rebuild all buckets from the de-biased parameters z; reset the weight p to 1."""
        if self._biased:
            self._unbias()
        super().rebuild()

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Multiply by the push-sum weight p, step, average, and divide by the new p."""
        self.rebuild_if_changed()
        self._bias()
        at_z = closure if closure is None else self._unbiased(closure)
        try:
            loss = super().step(self._scaled(update), at_z, scaled=scaled)
        finally:
            self._unbias()
        self._unify_copies()
        return loss

    @override
    def _unify_copies(self) -> None:
        if not self._biased:  # p differs between columns
            super()._unify_copies()

    def _scaled(self, update: Update) -> Update:
        """Wrap an update so that its change is multiplied by the step scale."""

        def scaled(closure: Closure | None) -> Any:
            before = self._copies_to_scale()
            loss = update(closure)
            self._scale_change(before)
            return loss

        return scaled

    def _unbiased(self, closure: Closure) -> Closure:
        """Wrap a closure so that it is evaluated at z."""

        def evaluate() -> Any:
            self._unbias()
            try:
                return closure()
            finally:
                self._bias()

        return evaluate

    def _bias(self) -> None:
        """Convert z to x: multiply the buckets by p."""
        self._biased = True
        for flat, p in self._with_push_sum_weights():
            flat.mul_(p)
        self._write_parts()

    def _unbias(self) -> None:
        """Convert x to z: divide the buckets by the current p."""
        self.repair_buckets()  # the update may have assigned parameters anew
        if not self._biased:
            return
        self._biased = False
        for flat, p in self._with_push_sum_weights():
            flat.div_(p)
        self._write_parts()

    def _with_push_sum_weights(self) -> list[tuple[torch.Tensor, float]]:
        weights = self.config.averager.windows.push_sum_weights()
        return [pair for pair in zip(self.flat_tensors(), weights, strict=True) if pair[1] != 1.0]
