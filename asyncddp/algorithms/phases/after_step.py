"""Communication phase that averages parameters after the optimizer's step."""

from __future__ import annotations

from typing import Any

from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    ParameterAveragingPhase,
    PhaseConfig,
    Update,
)


class AfterStepPhase(ParameterAveragingPhase):
    """Communication phase of ``adapt_then_combine``: averages after the optimizer's step.

    The optimizer steps as it does without the wrapper, so that clipping, scaling, accumulation and
    closures work unchanged; then all buckets are sent at once, and averaged as messages arrive.
    """

    def __init__(self, config: PhaseConfig) -> None:
        self.needs_gradient_hooks = config.passes_per_round > 1
        super().__init__(config)

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Run the optimizer's step, then average if it is due."""
        del scaled
        averaged = self.accumulation.due()
        self._in_step = True
        try:
            loss = update(closure)
        finally:
            self._in_step = False
        if averaged:
            self._average()
        self._end_step(averaged=averaged)
        return loss

    def _average(self) -> None:
        self.rebuild_if_changed()
        pending_round = self.config.averager.begin_round()
        if pending_round is not None:
            for index, bucket in enumerate(self.buckets):
                pending_round.start(index, bucket.flat)
            pending_round.finish()
