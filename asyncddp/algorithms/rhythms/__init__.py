"""Rhythms: the order of sending, stepping and taking, for each moment that a method may choose."""

from __future__ import annotations

from asyncddp.algorithms.contract import When
from asyncddp.algorithms.rhythms.after_biased_step import AfterBiasedStep
from asyncddp.algorithms.rhythms.after_step import AfterStep
from asyncddp.algorithms.rhythms.base import Closure, Rhythm, Setting, Update
from asyncddp.algorithms.rhythms.before_forward import BeforeForward
from asyncddp.algorithms.rhythms.gradient_ready import GradientReady
from asyncddp.algorithms.rhythms.in_backward import InBackward
from asyncddp.algorithms.rhythms.through_step import ThroughStep
from asyncddp.errors import ArgumentError

__all__ = ["RHYTHMS", "Closure", "Rhythm", "Setting", "Update", "rhythm_for"]

RHYTHMS: dict[When, type[Rhythm]] = {
    When.AFTER_BIASED_STEP: AfterBiasedStep,
    When.AFTER_STEP: AfterStep,
    When.BEFORE_FORWARD: BeforeForward,
    When.GRADIENT_READY: GradientReady,
    When.THROUGH_STEP: ThroughStep,
}


def rhythm_for(setting: Setting, *, update_in_backward: bool = False) -> Rhythm:
    """The rhythm that a method asks for.

    Args:
        setting: What it works on.
        update_in_backward: Whether the user's optimizer may step while the backward pass goes on.

    Raises:
        ArgumentError: The method does not average after the step, but ``update_in_backward``.
    """
    method = setting.mixer.algorithm
    if not update_in_backward:
        return RHYTHMS[method.when](setting)
    if method.when is not When.AFTER_STEP:
        raise ArgumentError(
            f"argument update_in_backward: {method.name} averages {method.when.value}; only a "
            "method that averages after_step, such as adapt_then_combine, can update in backward"
        )
    return InBackward(setting)
