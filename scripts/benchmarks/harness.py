"""Times the rivals of a table: checked, warmed up, and alternating in the same processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import torch

from benchmarks.contract import Call, Rival, Row, Table, Unavailable, World

__all__ = ["measure"]

_MOST_CALLS = 2000
_WARM_UP = 5


class _Timed:
    """One rival's work at one size, ready to be timed.

    Args:
        world: The ranks.
        call: The work.
        sample: Seconds that a round should last at least.
    """

    def __init__(self, world: World, call: Call, sample: float) -> None:
        self._world, self._call, self._number = world, call, count(1)
        self.calls = 1
        while True:  # also the warm-up; the quickest of a few, since the first call may connect
            took = max(world.comm.allgather(min(self.round() for _ in range(_WARM_UP))))
            enough = min(_MOST_CALLS, round(sample / took) or 1)
            if self.calls >= enough / 2:
                self.calls = enough
                return
            self.calls = min(self.calls * 4, enough)

    def round(self) -> float:
        """Seconds for one call, the mean of one round on this rank."""
        call, numbers = self._call, [next(self._number) for _ in range(self.calls)]
        self._world.comm.Barrier()
        start = time.perf_counter()
        for number in numbers:
            call(number)
        seconds = time.perf_counter() - start
        _settle(self._world)
        return seconds / self.calls


def _settle(world: World) -> None:
    """Leave the core to background threads, such as gloo's, until all ranks have ended the round.

    A rank that is through would else spin in MPI on the core that its own thread needs to serve
    the others.
    """
    ended = world.comm.Ibarrier()
    while not ended.Test():
        time.sleep(0.00005)


def _prepared(world: World, table: Table, rival: Rival, nbytes: int) -> Call:
    """The rival's call, checked against the table's expected result, on all ranks or on none.

    Raises:
        Unavailable: It cannot run on some rank, or its result is wrong there.
    """
    reason = None
    try:
        call = rival.prepare(nbytes)
    except Unavailable as problem:
        reason = str(problem)
    reason = next((one for one in world.comm.allgather(reason) if one is not None), None)
    if reason is not None:
        raise Unavailable(reason)
    result = call(0)
    right = True
    if table.expected is not None:
        right = torch.allclose(result, table.expected(nbytes), rtol=1e-5, atol=1e-6)
    if not all(world.comm.allgather(right)):
        raise Unavailable("its result is wrong")
    return call


@contextmanager
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    world: World,
    table: Table,
    *,
    rounds: int,
    sample: float,
    advance: Callable[[int], None],
) -> tuple[list[Row], dict[str, str]]:
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
    rows: list[Row] = []
    unavailable: dict[str, str] = {}
    table.begin()
    for nbytes in table.sizes:
        timed: dict[str, _Timed] = {}
        for rival in table.rivals:
            try:
                timed[rival.name] = _Timed(world, _prepared(world, table, rival, nbytes), sample)
            except Unavailable as problem:
                unavailable.setdefault(rival.name, str(problem))
        if not timed:
            break
        seconds = np.empty((rounds, len(timed)))
        order = list(enumerate(timed.values()))
        with _without_gc():
            for number in range(rounds):
                for column, one in order if number % 2 == 0 else reversed(order):
                    seconds[number, column] = one.round()
        slowest = np.max(world.comm.allgather(seconds), axis=0)
        for column, (name, one) in enumerate(timed.items()):
            times = tuple(slowest[:, column].tolist())
            rows.append(Row(table.key, name, nbytes, one.calls, times))
        advance(nbytes)
    return rows, unavailable
