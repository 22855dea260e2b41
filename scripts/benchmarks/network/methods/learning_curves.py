"""Trainings to an accuracy: the models of all ranks over time, judged off the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import asyncddp as bf
from benchmarks.network.host_ranks import wait_until_quiet
from benchmarks.network.methods.digits_training import DigitsTraining
from benchmarks.network.methods.measurements import LearningCurve
from benchmarks.network.methods.method_training import ComparedTraining
from benchmarks.tables import RankGroup

__all__ = ["learn"]

_MOST_STEPS = 60
_FREE = 0.4  # of the time, where nobody waits, and steps are cheap
_MARKS, _EVERY = 40, 0.05  # models kept of a training, and the least seconds between two


@dataclass(frozen=True)
class _Mark:
    seconds: float
    steps: int
    parameters: torch.Tensor


def learn(
    world: RankGroup,
    name: str,
    training: ComparedTraining,
    judge: DigitsTraining,
    step: float,
    slower: float,
    most: float,
) -> LearningCurve:
    """Train a model that nobody has trained before. Collective.

    Args:
        world: The ranks.
        name: The method's.
        training: The method.
        judge: Another model, into which parameters are put to be judged.
        step: Seconds of a step as measured before; equal on all ranks.
        slower: How many times slower the last rank's accelerator is.
        most: Seconds of training at most.
    """
    if world.rank == world.size - 1:
        training.digits.slow_down(slower)
    steps = min(_MOST_STEPS, max(3, round(most / step))) if training.waits else None
    seconds = _FREE * most if steps is None else steps * step
    marks = _marks(world, training, steps, seconds)
    own = [(mark.seconds, mark.steps, judge.accuracy(mark.parameters)) for mark in marks]
    every: list[list[tuple[float, int, float]]] = world.comm.allgather(own)
    moments = sorted({point[0] for points in every for point in points})
    latest = [
        [[point for point in points if point[0] <= moment][-1] for points in every]
        for moment in moments
    ]
    heights = [sum(point[2] for point in points) / len(points) for points in latest]
    return LearningCurve(name, slower, moments, [points[0][1] for points in latest], heights)


def _marks(
    world: RankGroup, training: ComparedTraining, steps: int | None, seconds: float
) -> list[_Mark]:
    """Train, for so many steps or seconds, and keep the parameters now and then."""
    every = max(_EVERY, seconds / _MARKS)
    training.proceed()
    world.comm.Barrier()
    start = time.perf_counter()
    marks = [_mark(training, 0.0, 0)]
    now, made = 0.0, 0
    while made < steps if steps is not None else now < seconds:
        try:
            training.step()
        except bf.NonFiniteError:  # on all ranks: it has diverged
            break
        now, made = time.perf_counter() - start, made + 1
        if now - marks[-1].seconds >= every or made == steps:
            marks.append(_mark(training, now, made))
    training.pause()
    wait_until_quiet(world)
    return marks


def _mark(training: ComparedTraining, seconds: float, steps: int) -> _Mark:
    parameters = training.digits.model.parameters()
    with torch.no_grad():
        return _Mark(seconds, steps, torch.nn.utils.parameters_to_vector(parameters))
