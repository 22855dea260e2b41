"""Timeline records of operation calls: how long a call lasts, and which ranks it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncddp.engine.work import Work
from asyncddp.timeline.profiler_range import ProfilerRange
from asyncddp.timeline.tracer import Tracer


class WaitTracer:
    """Tracer of one thread's wait for an operation: records which peers were missing, and how long.

    Args:
        tracer: The timeline's tracer.
        work: The operation that the thread waits for.
        progress: Makes a round of progress.
    """

    def __init__(self, tracer: Tracer, work: Work[Any], progress: Callable[[], bool]) -> None:
        spec = work.spec
        self._work, self._progress = work, progress
        self._waiting = tracer.start_wait(spec.verb, spec.label)

    def progress(self) -> bool:
        """Make a round of progress, and tell whether anything moved."""
        moved = self._progress()
        if not moved:
            self._waiting.note_missing([peer for peer, _ in self._work.missing()])
        return moved

    def end(self) -> None:
        """End the wait's span."""
        self._waiting.end()


def trace_call(
    tracer: Tracer | None, verb: str, name: str, about: Sequence[object]
) -> AbstractContextManager[object]:
    """Record the ``with`` block as one call of a verb, in the timeline or torch's profiler.

    Args:
        tracer: The timeline's tracer; None for torch's profiler alone.
        verb: The verb.
        name: The name that it was given.
        about: The arguments of the call, in which the first tensor gives the size.
    """
    if tracer is None:
        return ProfilerRange(f"ENQUEUE_{verb.upper()}")
    nbytes = next((one.nbytes for one in about if isinstance(one, torch.Tensor)), 0)
    return tracer.enqueue_span(verb, name, nbytes)
