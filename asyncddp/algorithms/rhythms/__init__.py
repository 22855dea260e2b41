"""Rhythms: the order of sending, stepping and taking, for each moment that a method may choose."""

from __future__ import annotations

from asyncddp.algorithms.contract import When
from asyncddp.algorithms.rhythms.after_step import AfterStep
from asyncddp.algorithms.rhythms.base import Closure, Rhythm, Setting, Update
from asyncddp.algorithms.rhythms.before_forward import BeforeForward
from asyncddp.algorithms.rhythms.gradient_ready import GradientReady
from asyncddp.algorithms.rhythms.in_backward import InBackward

__all__ = ["RHYTHMS", "Closure", "InBackward", "Rhythm", "Setting", "Update"]

RHYTHMS: dict[When, type[Rhythm]] = {
    When.AFTER_STEP: AfterStep,
    When.BEFORE_FORWARD: BeforeForward,
    When.GRADIENT_READY: GradientReady,
}
