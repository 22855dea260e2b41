"""How far rank 0's clock is ahead of this rank's: asked at the start, and now and then afterwards.

At the start rank 0 answers one rank after the other, so that answers are quick. Later nobody waits:
a question is a message that whoever drives rank 0's engine answers, and an answer that took long is
of no use.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.engine import Engine
from asyncddp.errors import NotInitializedError
from asyncddp.memory.allocate import zeros
from asyncddp.timeline.clock import Sample, best
from asyncddp.timeline.recorder import Recorder
from asyncddp.transport import Transport

__all__ = ["Clock", "measure"]

_SERVICE = "clock"
_TAG = 0
_TIMES = 10
_EVERY = 30e9  # nanoseconds from one measurement to the next
_TRIES = 20  # questions of a measurement at most, each after a look of the thread that writes
_GOOD = 4  # an answer is of use if it knows so many times worse than the first at most …
_FINE = 50_000  # … or has less error than so many nanoseconds
_PATIENCE = 0.02  # seconds for the last answer


def measure(transport: Transport, recording: Sequence[int], timeout: float) -> Sample | None:
    """Ask rank 0 a few times, or be rank 0 and answer; collective.

    Args:
        transport: The wire between all ranks.
        recording: The ranks that want to know.
        timeout: Seconds for an answer.

    Returns:
        The best measurement; None on ranks that do not want to know.
    """
    rank, word = transport.rank, zeros((1,), torch.int64)
    if rank == 0:
        for peer in recording:
            for _ in range(_TIMES if peer else 0):
                transport.receive(word, peer, _TAG, timeout)
                transport.send(word.fill_(time.monotonic_ns()), peer, _TAG, timeout)
        return Sample(time.monotonic_ns(), 0, 0) if 0 in recording else None
    if rank not in recording:
        return None
    samples = []
    for _ in range(_TIMES):
        asked = time.monotonic_ns()
        transport.send(word, 0, _TAG, timeout)
        transport.receive(word, 0, _TAG, timeout)
        samples.append(Sample.of(asked, int(word), time.monotonic_ns()))
    return best(samples)


class Clock:
    """Goes on measuring, and answers where this is rank 0.

    Args:
        engine: Sends and hears.
        recorder: Takes notes of what was found; None on a rank that only answers.
        first: What was found at the start.
    """

    def __init__(self, engine: Engine, recorder: Recorder | None, first: Sample | None) -> None:
        self._engine, self._recorder, self._first = weakref.ref(engine), recorder, first
        self._found: list[Sample] = []
        self._tries, self._next = 0, time.monotonic_ns() + _EVERY
        with engine.parcels() as parcels:
            parcels.services[_SERVICE] = self._hear
        if recorder is not None and first is not None:
            recorder.clock(first)
            if engine.transport.rank != 0 and engine.transport.threads:
                recorder.every_look.append(self._look)

    def stop(self) -> None:
        """Measure once more, if rank 0 answers soon."""
        recorder, engine = self._recorder, self._engine()
        if recorder is None or engine is None or engine.transport.rank == 0 or engine.closed:
            return
        recorder.every_look.clear()
        known, until = len(self._found), time.monotonic() + _PATIENCE
        self._ask()
        while len(self._found) == known and time.monotonic() < until:
            engine.progress()
            engine.transport.rest(0)
        self._note()

    def _look(self) -> None:
        """Ask where it is time to; called by the thread that writes."""
        if time.monotonic_ns() < self._next:
            return
        if self._tries < _TRIES:
            self._tries += 1
            self._ask()
            return
        self._tries, self._next = 0, time.monotonic_ns() + _EVERY
        self._note()

    def _ask(self) -> None:
        engine = self._engine()
        if engine is not None and not engine.closed:
            try:
                with engine.parcels() as parcels:
                    parcels.send(0, _SERVICE, (time.monotonic_ns(), None))
            except NotInitializedError:
                return  # it was closed meanwhile

    def _hear(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Answer a question, or hear an answer; called by the engine."""
        del tensor
        (asked, answer), heard = content, time.monotonic_ns()
        engine = self._engine()
        if answer is not None:
            self._found.append(Sample.of(asked, answer, heard))
        elif engine is not None:
            with engine.parcels() as parcels:
                parcels.send(peer, _SERVICE, (asked, time.monotonic_ns()))

    def _note(self) -> None:
        """Note the best of what was found, where it knows enough."""
        found, self._found = self._found, []
        if found and self._recorder is not None and self._first is not None:
            sample = best(found)
            if sample.error <= max(_FINE, _GOOD * self._first.error):
                self._recorder.clock(sample)
