"""Communication phases: start and finish averaging rounds at points around an optimizer's step."""

from __future__ import annotations

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.algorithms.phases.after_step import AfterStepPhase, PushSumPhase
from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    CommunicationPhase,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.phases.gradient_ready import GradientReadyPhase
from asyncddp.algorithms.phases.overlapped import BackgroundAveragingPhase, OverlappedPhase
from asyncddp.algorithms.phases.time_interval import TimeIntervalPhase
from asyncddp.algorithms.phases.update_in_backward import UpdateInBackwardPhase
from asyncddp.errors import ArgumentError

__all__ = [
    "PHASES",
    "Closure",
    "CommunicationPhase",
    "PhaseConfig",
    "Update",
    "check_update_in_backward",
    "phase_for",
]

PHASES: dict[CommunicationTiming, type[CommunicationPhase]] = {
    CommunicationTiming.AFTER_BIASED_STEP: PushSumPhase,
    CommunicationTiming.AFTER_STEP: AfterStepPhase,
    CommunicationTiming.BEFORE_FORWARD: OverlappedPhase,
    CommunicationTiming.GRADIENT_READY: GradientReadyPhase,
    CommunicationTiming.INTERVAL: TimeIntervalPhase,
    CommunicationTiming.THROUGH_STEP: BackgroundAveragingPhase,
}


def phase_for(config: PhaseConfig, *, update_in_backward: bool = False) -> CommunicationPhase:
    """Create the communication phase of the averager's algorithm.

    Raises:
        ArgumentError: ``update_in_backward`` with a method that does not average after the step.
    """
    method = config.averager.algorithm
    check_update_in_backward(method, update_in_backward=update_in_backward)
    return UpdateInBackwardPhase(config) if update_in_backward else PHASES[method.when](config)


def check_update_in_backward(method: Algorithm, *, update_in_backward: bool) -> None:
    """Raise an ArgumentError if ``update_in_backward`` is set but the method cannot do it."""
    if update_in_backward and method.when is not CommunicationTiming.AFTER_STEP:
        raise ArgumentError(
            f"argument update_in_backward: {method.name} averages {method.when.value}; only a "
            "method that averages after_step, such as adapt_then_combine, can update in backward"
        )
    if update_in_backward and (method.delay or method.hidden_rounds):
        remedy = "expected False, or delay=0" if method.delay else "expected False"
        steps = method.delay or method.communication_interval
        raise ArgumentError(
            f"argument update_in_backward: a round of {method.name} lasts {steps} steps "
            f"more, in which buckets change; {remedy}"
        )
    if update_in_backward and method.replaces_gradients:
        raise ArgumentError(
            f"argument update_in_backward: {method.name} replaces gradients when all are there; "
            "expected False, or a method that leaves them alone, such as adapt_then_combine"
        )
