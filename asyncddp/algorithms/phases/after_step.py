"""Communication phase that averages parameters after the optimizer's step."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

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

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        loss = update(closure)
        if averaged:
            self._start_round()
            pending_round, self._round = self._round, None
            if pending_round is not None:
                pending_round.finish()
        return loss
