"""Timing of trainings that take turns of some steps, also of those that never wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.network.host_ranks import transmitted, wait_until_quiet
from benchmarks.network.methods.digits_training import BATCH
from benchmarks.network.methods.measurements import MethodTurns
from benchmarks.network.methods.method_training import ComparedTraining
from benchmarks.tables import RankGroup

__all__ = ["measure_turns"]

_TURN, _FREE_TURN = 0.4, 1.2  # seconds; longer where nobody waits, for several averages
_FEWEST, _MOST = 2, 40  # steps of a turn
_FEWEST_BESIDE_SLOW = 8  # by one peer a step all ranks have met a slow one after log2 n of them


@dataclass(frozen=True)
class _Turn:
    """One rank's turn."""

    steps: int
    seconds: float
    nbytes: int
    payload: int | None

    @property
    def step(self) -> float:
        return self.seconds / self.steps


def measure_turns(
    world: RankGroup,
    trainings: Mapping[str, ComparedTraining],
    rounds: int,
    interface: str,
    slower: float = 1.0,
) -> list[MethodTurns]:
    """Let all methods take turns; every second round goes backwards. Collective.

    Args:
        world: The ranks.
        trainings: Methods, warmed up.
        rounds: Turns of each.
        interface: Whose bytes are counted.
        slower: How many times slower the last rank's accelerator is meanwhile.
    """
    last = world.rank == world.size - 1
    for training in trainings.values():
        training.digits.slow_down(slower if last else 1.0)
    fewest = _FEWEST if slower == 1 else _FEWEST_BESIDE_SLOW
    counts = {name: _steps_of_turn(world, training, fewest) for name, training in trainings.items()}
    turns: dict[str, list[_Turn]] = {name: [] for name in trainings}
    for number in range(rounds):
        order = list(trainings.items())
        for name, training in order if number % 2 == 0 else reversed(order):
            turns[name].append(_turn(world, training, counts[name], interface))
    for training in trainings.values():
        training.digits.slow_down(1 / slower if last else 1.0)
    every = world.comm.allgather(turns)
    return [_together(name, slower, [one[name] for one in every]) for name in trainings]


def _steps_of_turn(world: RankGroup, training: ComparedTraining, fewest: int) -> int:
    """Steps of a turn: equal on all ranks that wait for each other."""
    alone = _turn(world, training, 1, "lo").seconds
    if training.waits:
        alone = max(world.comm.allgather(alone))
    lasts = _TURN if training.waits else _FREE_TURN
    return min(_MOST, max(fewest, round(lasts / alone)))


def _turn(world: RankGroup, training: ComparedTraining, steps: int, interface: str) -> _Turn:
    training.proceed()
    world.comm.Barrier()
    before, payload, start = transmitted(interface), training.payload, time.perf_counter()
    for _ in range(steps):
        training.step()
    seconds = time.perf_counter() - start
    nbytes = transmitted(interface) - before
    own = None if payload is None else (training.payload or 0) - payload
    training.pause()
    wait_until_quiet(world)
    return _Turn(steps, seconds, nbytes, own)


def _together(name: str, slower: float, ranks: Sequence[Sequence[_Turn]]) -> MethodTurns:
    """What all ranks' turns say; each has one for every round."""
    rounds = list(zip(*ranks, strict=True))
    judged = len(ranks) - (slower > 1)
    payloads = [turn.payload / turn.steps for turn in ranks[0] if turn.payload is not None]
    return MethodTurns(
        name,
        slower,
        [max(turn.step for turn in one[:judged]) for one in rounds],
        [sum(BATCH / turn.step for turn in one) for one in rounds],
        median(max(turn.nbytes / turn.steps for turn in one) for one in rounds),
        median(payloads) if payloads else None,
    )
