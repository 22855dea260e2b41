"""Timing of a table's rivals: checked, warmed up, and alternating in the same processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, TimingRow, TimingTable

_MOST_CALLS = 2000
_WARM_UP = 5
_SLOW = 20  # samples after which a call needs no more than two warm-up rounds


class _TimedRival:
    """Rival at one size, checked and warmed up, whose rounds can be timed.

    Args:
        world: The ranks.
        table: Whose work.
        rival: Who does it.
        call: The work.
        sample: Seconds that a round should last at least.
    """

    def __init__(
        self, world: RankGroup, table: TimingTable, rival: Rival, call: Call, sample: float
    ) -> None:
        self._world, self._rival, self._call = world, rival, call
        self._lead, self._numbers = table.lead, count(1)
        self.calls = 1
        took = self._quickest(1)  # may have to connect
        while True:
            took = self._quickest(2 if took > _SLOW * sample else _WARM_UP)
            enough = min(_MOST_CALLS, round(sample / took) or 1)
            if self.calls >= enough / 2:
                self.calls = enough
                return
            self.calls = min(self.calls * 4, enough)

    def _quickest(self, rounds: int) -> float:
        """Seconds for one call on the slowest rank, in the quickest of some rounds."""
        seconds = min(self.round() for _ in range(rounds)) * self._rival.parts
        return float(max(self._world.comm.allgather(seconds)))

    def round(self) -> float:
        """Seconds for one call, or one part of it: the mean of one round on this rank."""
        numbers = list(islice(self._numbers, self._lead + self.calls))
        self._world.comm.Barrier()
        for number in numbers[: self._lead]:
            _end(self._rival, self._call(number))
        clock = _together if self._rival.finish is None else self._one_by_one
        seconds = clock(self._call, numbers[self._lead :])
        _settle(self._world)
        return seconds / self.calls / self._rival.parts

    def _one_by_one(self, call: Call, numbers: Sequence[int]) -> float:
        """Seconds for all calls of a round, without what ends each of them."""
        seconds = 0.0
        for number in numbers:
            start = time.perf_counter()
            begun = call(number)
            seconds += time.perf_counter() - start
            _end(self._rival, begun)
            del begun  # else the next call would free its tensors on the clock
        return seconds


def _together(call: Call, numbers: Sequence[int]) -> float:
    """Seconds for all calls of a round."""
    start = time.perf_counter()
    for number in numbers:
        call(number)
    return time.perf_counter() - start


def _end(rival: Rival, begun: Any) -> Any:
    return begun if rival.finish is None else rival.finish(begun)


def _settle(world: RankGroup) -> None:
    """Leave the core to background threads, such as gloo's, until all ranks have ended the round.

    A rank that is through would else spin in MPI on the core that its own thread needs to serve
    the others.
    """
    ended = world.comm.Ibarrier()
    while not ended.Test():
        time.sleep(0.00005)


def _prepared(world: RankGroup, rival: Rival, nbytes: int, expected: torch.Tensor | None) -> Call:
    """The rival's call, checked against the table's expected result, on all ranks or on none.

    Raises:
        Unavailable: It cannot run on some rank, or its result is wrong there.
    """
    reason = None
    try:
        call = rival.prepare(nbytes)
    except RivalUnavailableError as problem:
        reason = str(problem)
    reason = next((one for one in world.comm.allgather(reason) if one is not None), None)
    if reason is not None:
        raise RivalUnavailableError(reason)
    result = _end(rival, call(0))
    right = True
    if expected is not None and rival.checked:
        if not isinstance(result, torch.Tensor):
            result = torch.cat([part.flatten() for part in result])
        right = torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    if not all(world.comm.allgather(right)):
        raise RivalUnavailableError("its result is wrong")
    return call


def measure(
    world: RankGroup,
    table: TimingTable,
    *,
    rounds: int,
    sample: float = 0.0,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[TimingRow], dict[str, str]]:
    """Measure a table. All rivals take turns in every round; every second round goes backwards.

    Args:
        world: The ranks; all of them call this.
        table: What to measure.
        rounds: Rounds for each size.
        sample: Seconds that one rival's turn should last at least.
        advance: Told each size when it is done.

    Returns:
        The rows, and for rivals that could not run the reason.
    """
    rows: list[TimingRow] = []
    unavailable: dict[str, str] = {}
    table.begin()
    for nbytes in table.sizes:
        timed, missing = _ready(world, table, nbytes, sample)
        unavailable = {**missing, **unavailable}
        if not timed:
            break
        seconds = take_turns([one.round for one in timed.values()], rounds)
        slowest = np.max(world.comm.allgather(seconds), axis=0)
        rows += [
            TimingRow(table.key, name, nbytes, one.calls, tuple(slowest[:, column].tolist()))
            for column, (name, one) in enumerate(timed.items())
        ]
        del timed  # else the buffers of this size would be there beside those of the next
        advance(nbytes)
    table.end()
    return rows, unavailable


def take_turns(
    turns: Sequence[Callable[[], float]], rounds: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return what each turn gave in each round; every second round goes backwards."""
    found = np.empty((rounds, len(turns)))
    order = list(enumerate(turns))
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for column, turn in order if number % 2 == 0 else reversed(order):
                found[number, column] = turn()
    finally:
        gc.enable()
    return found


def _ready(
    world: RankGroup, table: TimingTable, nbytes: int, sample: float
) -> tuple[dict[str, _TimedRival], dict[str, str]]:
    """Prepare the rivals that can run at a size, and collect why the others cannot."""
    expected = None if table.expected is None else table.expected(nbytes)
    timed: dict[str, _TimedRival] = {}
    unavailable: dict[str, str] = {}
    for rival in table.rivals:
        try:
            call = _prepared(world, rival, nbytes, expected)
            timed[rival.name] = _TimedRival(world, table, rival, call, sample)
        except RivalUnavailableError as problem:
            unavailable[rival.name] = str(problem)
    return timed, unavailable
