"""Measurement of the offset between rank 0's clock and this rank's, for merging timelines.

At the start rank 0 answers one rank after the other, so that answers are quick. Later measurements
do not block: a query is a message that rank 0's engine answers, and slow answers are discarded.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from asyncddp.engine import ProgressEngine
from asyncddp.errors import NotInitializedError
from asyncddp.tensors.allocation import zeros
from asyncddp.timeline.tracer import ClockSample, Tracer
from asyncddp.transport import Transport

_SERVICE = "clock"
_TAG = 0
_INITIAL_SAMPLES = 10
_INTERVAL = 30e9  # nanoseconds from one measurement to the next
_MAX_QUERIES = 20  # queries per measurement at most, one per flush of the writer thread
_MAX_ERROR_RATIO = 4  # a sample is recorded if its error is at most so many times the first's …
_MAX_ERROR = 50_000  # … or below so many nanoseconds
_FINAL_WAIT = 0.02  # seconds for the last answer


def measure_clock_offset(
    transport: Transport, recording: Sequence[int], timeout: float
) -> ClockSample | None:
    """Measure this rank's clock offset to rank 0, by round trips to rank 0; collective.

    ``recording`` are the ranks with a timeline; elsewhere the result is None.
    """
    rank, word = transport.rank, zeros((1,), torch.int64)
    if rank == 0:
        for peer in recording:
            for _ in range(_INITIAL_SAMPLES if peer else 0):
                transport.receive(word, peer, _TAG, timeout)
                transport.send(word.fill_(time.monotonic_ns()), peer, _TAG, timeout)
        return ClockSample(time.monotonic_ns(), 0, 0) if 0 in recording else None
    if rank not in recording:
        return None
    samples = []
    for _ in range(_INITIAL_SAMPLES):
        asked = time.monotonic_ns()
        transport.send(word, 0, _TAG, timeout)
        transport.receive(word, 0, _TAG, timeout)
        samples.append(ClockSample.from_round_trip(asked, int(word), time.monotonic_ns()))
    return min(samples, key=lambda sample: sample.error)


class ClockSync:
    """Periodic measurement of a rank's clock offset, by queries that rank 0 answers.

    ``tracer`` records the offsets, from the ``first`` one; both are None without a timeline.
    """

    def __init__(
        self, engine: ProgressEngine, tracer: Tracer | None, first: ClockSample | None
    ) -> None:
        self._engine, self._tracer, self._first = weakref.ref(engine), tracer, first
        self._found: list[ClockSample] = []
        self._tries, self._next = 0, time.monotonic_ns() + _INTERVAL
        with engine.active_messages() as active_messages:
            active_messages.handlers[_SERVICE] = self._receive
        if tracer is not None and first is not None:
            tracer.record_clock_offset(first)
            if engine.transport.rank != 0 and engine.transport.allows_threads:
                tracer.flush_callbacks.append(self._maybe_query)

    def stop(self) -> None:
        """Stop the measurements, after a last query to rank 0."""
        tracer, engine = self._tracer, self._engine()
        if tracer is None or engine is None or engine.transport.rank == 0 or engine.closed:
            return
        tracer.flush_callbacks.clear()
        known, until = len(self._found), time.monotonic() + _FINAL_WAIT
        self._query()
        while len(self._found) == known and time.monotonic() < until:
            engine.progress()
            engine.transport.backoff(0)
        self._record_best()

    def _maybe_query(self) -> None:
        """Query rank 0 if a query is due; called by the writer thread."""
        if time.monotonic_ns() < self._next:
            return
        if self._tries < _MAX_QUERIES:
            self._tries += 1
            self._query()
        else:
            self._tries, self._next = 0, time.monotonic_ns() + _INTERVAL
            self._record_best()

    def _query(self) -> None:
        engine = self._engine()
        if engine is not None:
            with suppress(NotInitializedError), engine.active_messages() as active_messages:
                active_messages.send(0, _SERVICE, (time.monotonic_ns(), None))

    def _receive(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Handle a query on rank 0, or an answer on other ranks; called by the engine."""
        del tensor
        (asked, answer), heard = content, time.monotonic_ns()
        engine = self._engine()
        if answer is not None:
            self._found.append(ClockSample.from_round_trip(asked, answer, heard))
        elif engine is not None:
            with engine.active_messages() as active_messages:
                active_messages.send(peer, _SERVICE, (asked, time.monotonic_ns()))

    def _record_best(self) -> None:
        found, self._found = self._found, []
        if found and self._tracer is not None and self._first is not None:
            sample = min(found, key=lambda sample: sample.error)
            if sample.error <= max(_MAX_ERROR, _MAX_ERROR_RATIO * self._first.error):
                self._tracer.record_clock_offset(sample)
