"""Work of ``network-methods`` on every host: turns of all methods, then trainings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

import asyncddp as bf
from benchmarks import baselines
from benchmarks.machine_info import facts_of_run
from benchmarks.network.hosts import transmitted, wait_until_quiet
from benchmarks.network.methods.digits_training import BATCH, DigitsTraining, read_digits
from benchmarks.network.methods.method_tables import LearningCurve, MethodTurns
from benchmarks.network.methods.method_training import (
    LOCAL,
    METHODS,
    RATE,
    RATES,
    ComparedTraining,
    prepare,
)
from benchmarks.tables import RankGroup, RivalUnavailableError

_WARM_UP = 4  # steps, of which the last two are compressed
_TURNS_PLAIN, _LEARNING_PLAIN = 2, 10  # steps before qadam and DDP's PowerSGD compress
_STANDING = 1e-6  # step size of turns, which are not to diverge however many there are
_TURN, _FREE_TURN = 0.4, 1.2  # seconds; longer where nobody waits, for several averages
_FEWEST, _MOST = 2, 40  # steps of a turn
_FEWEST_BESIDE_SLOW = 8  # by one peer a step all ranks have met a slow one after log2 n of them
_MOST_STEPS = 60  # of a training
_FREE = 0.4  # of the time of a training, where nobody waits, and steps are cheap
_MARKS, _EVERY = 40, 0.05  # models kept of a training, and the least seconds between two


class _Turn(NamedTuple):
    """One rank's turn."""

    steps: int
    seconds: float
    nbytes: int
    payload: int | None


class _Mark(NamedTuple):
    """A rank's model in the middle of a training."""

    seconds: float
    steps: int
    parameters: torch.Tensor


@dataclass
class _Run:
    """What this run's ranks measure, and with what.

    Args:
        world: The ranks.
        digits: Images and labels.
        accelerator: Seconds of a step in which the processor is free.
        interface: Whose bytes are counted.
    """

    world: RankGroup
    digits: Any
    accelerator: float
    interface: str
    missing: dict[str, str] = field(default_factory=dict)

    def fresh(self) -> DigitsTraining:
        """A model that nobody has trained, with this rank's images."""
        return DigitsTraining(self.digits, self.world.rank, self.world.size, self.accelerator)

    def trainings(self, names: Sequence[str]) -> dict[str, ComparedTraining]:
        """All methods that can run, warmed up."""
        found = {}
        for name in names:
            self.world.say(f"preparing {name}")
            try:
                training = prepare(name, self.fresh(), self.world.gloo, _TURNS_PLAIN, _STANDING)
            except RivalUnavailableError as problem:
                self.missing[name] = str(problem)
                continue
            for _ in range(_WARM_UP):
                training.step()
            training.pause()
            found[name] = training
        return found

    def slow_down(self, training: ComparedTraining, times: float) -> None:
        """Let the last rank's accelerator take so many times as long from now on."""
        if self.world.rank == self.world.size - 1:
            training.digits.slow_down(times)

    def turns(
        self, trainings: dict[str, ComparedTraining], rounds: int, slower: float
    ) -> list[MethodTurns]:
        """Let all methods take turns, with the last rank so many times slower meanwhile.

        Every second round goes backwards.
        """
        self.world.say(f"turns, last rank {slower:g} times slower")
        for training in trainings.values():
            self.slow_down(training, slower)
        fewest = _FEWEST if slower == 1 else _FEWEST_BESIDE_SLOW
        counts = {name: self._steps_of_turn(one, fewest) for name, one in trainings.items()}
        turns: dict[str, list[_Turn]] = {name: [] for name in trainings}
        for number in range(rounds):
            order = list(trainings.items())
            for name, training in order if number % 2 == 0 else reversed(order):
                turns[name].append(self._turn(training, counts[name], self.interface))
        for training in trainings.values():
            self.slow_down(training, 1 / slower)
        every = self.world.comm.allgather(turns)
        return [_together(name, slower, [one[name] for one in every]) for name in trainings]

    def _steps_of_turn(self, training: ComparedTraining, fewest: int) -> int:
        """Steps of a turn: equal on all ranks that wait for each other."""
        alone = self._turn(training, 1, "lo").seconds
        if training.waits:
            alone = max(self.world.comm.allgather(alone))
        lasts = _TURN if training.waits else _FREE_TURN
        return min(_MOST, max(fewest, round(lasts / alone)))

    def _turn(self, training: ComparedTraining, steps: int, interface: str) -> _Turn:
        training.proceed()
        self.world.comm.Barrier()
        before, payload, start = transmitted(interface), training.payload, time.perf_counter()
        for _ in range(steps):
            training.step()
        seconds = time.perf_counter() - start
        nbytes = transmitted(interface) - before
        own = None if payload is None else (training.payload or 0) - payload
        training.pause()
        wait_until_quiet(self.world)
        return _Turn(steps, seconds, nbytes, own)

    def curves(self, turns: Sequence[MethodTurns], most: float) -> Iterator[LearningCurve]:
        """A training of so many seconds at most for what took turns with no rank slowed down."""
        judge = self.fresh()
        for turn in (one for one in turns if one.slower == 1):
            self.world.say(f"training {turn.name}")
            rate = RATES.get(turn.name, RATE)
            training = prepare(turn.name, self.fresh(), self.world.gloo, _LEARNING_PLAIN, rate)
            yield self._learnt(turn, training, judge, most)

    def _learnt(
        self, turn: MethodTurns, training: ComparedTraining, judge: DigitsTraining, most: float
    ) -> LearningCurve:
        """Train a model that nobody has trained before, and judge it off the clock; collective."""
        step = median(turn.seconds)
        steps = min(_MOST_STEPS, max(3, round(most / step))) if training.waits else None
        marks = self._marks(training, steps, _FREE * most if steps is None else steps * step)
        own = [(mark.seconds, mark.steps, judge.accuracy(mark.parameters)) for mark in marks]
        every: list[list[tuple[float, int, float]]] = self.world.comm.allgather(own)
        moments = sorted({point[0] for points in every for point in points})
        latest = [
            [[point for point in points if point[0] <= moment][-1] for points in every]
            for moment in moments
        ]
        heights = [sum(point[2] for point in points) / len(points) for points in latest]
        made = [points[0][1] for points in latest]
        return LearningCurve(turn.name, turn.slower, moments, made, heights)

    def _marks(self, training: ComparedTraining, steps: int | None, seconds: float) -> list[_Mark]:
        """Train, for so many steps or seconds, and keep the parameters now and then."""
        every = max(_EVERY, seconds / _MARKS)
        training.proceed()
        self.world.comm.Barrier()
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
        wait_until_quiet(self.world)
        return marks


def _mark(training: ComparedTraining, seconds: float, steps: int) -> _Mark:
    parameters = training.digits.model.parameters()
    with torch.no_grad():
        return _Mark(seconds, steps, torch.nn.utils.parameters_to_vector(parameters))


def _together(name: str, slower: float, ranks: Sequence[Sequence[_Turn]]) -> MethodTurns:
    """What all ranks' turns say; each has one for every round."""
    rounds = list(zip(*ranks, strict=True))
    judged = len(ranks) - (slower > 1)
    payloads = [turn.payload / turn.steps for turn in ranks[0] if turn.payload is not None]
    return MethodTurns(
        name,
        slower,
        [max(turn.seconds / turn.steps for turn in one[:judged]) for one in rounds],
        [sum(BATCH * turn.steps / turn.seconds for turn in one) for one in rounds],
        median(max(turn.nbytes / turn.steps for turn in one) for one in rounds),
        median(payloads) if payloads else None,
    )


def measure(
    accelerator: float,
    rounds: int,
    slower: Sequence[float],
    learn: float = 0.0,
    names: Sequence[str] = (),
    interface: str = "e0",
) -> dict[str, Any]:
    """Measure on this run's ranks.

    Args:
        accelerator: Seconds of a step in which the processor is free.
        rounds: ProposerTurns of each method.
        slower: How many times slower the last rank is, each in turn.
        learn: Seconds of a training at most; 0 for none.
        names: Of the methods; none for all.
        interface: Between the hosts.
    """
    torch.set_num_threads(1)
    bf.init()
    world = baselines.join(interface)
    digits = bf.broadcast_object(read_digits() if world.rank == 0 else None, root_rank=0)
    run = _Run(world, digits, accelerator, interface)
    facts = facts_of_run(world)
    trainings = run.trainings(names or (LOCAL, *METHODS))
    turns = [one for times in slower for one in run.turns(trainings, rounds, times)]
    curves = run.curves(turns, learn) if learn else ()
    found = {"turns": [asdict(one) for one in turns], "curves": [asdict(one) for one in curves]}
    return {"header": facts, **found, "missing": run.missing}
