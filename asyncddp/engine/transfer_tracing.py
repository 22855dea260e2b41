"""Tracing: variants of transfers, ring buffers and waits that record spans in the timeline.

They are created in place of the plain ones where a timeline is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.shm.arena import Arena, MappedChunk, SharedMemoryHandle
from asyncddp.shm.ring_buffer import ChunkLayout, ReceiveRingBuffer, SendRingBuffer
from asyncddp.timeline.chrome_trace import Span
from asyncddp.timeline.profiler_range import ProfilerRange
from asyncddp.timeline.tracer import Tracer
from asyncddp.timeline.tracks import TRANSFER_TRACK
from asyncddp.transport.base import Request

if TYPE_CHECKING:
    from asyncddp.engine.work import Work


class TracedRequest:
    """Transport request that records its transfer in the timeline when it completes.

    Args:
        request: The request.
        record: Called once, when the request has completed well.
    """

    def __init__(self, request: Request, record: Callable[[], None]) -> None:
        self._request = request
        self._record: Callable[[], None] | None = record

    def done(self) -> bool:
        """Tell whether it has completed."""
        completed = self._request.done()
        if completed and self._record is not None:
            record, self._record = self._record, None
            record()
        return completed

    def abandon(self) -> None:
        """Give up waiting for it."""
        self._record = None
        self._request.abandon()


class TracedSendRingBuffer(SendRingBuffer):
    """Send ring buffer that records each tensor sent through it in the timeline.

    Args:
        tracer: The timeline's tracer.
        verb: The verb that exchanges through the ring.
        name: The name under which it does so.
        arena: The shared memory; this and what follows are as for :class:`SendRingBuffer`.
        ranks: The ranks of the machine.
        layout: How its tensors are split into chunks.
    """

    def __init__(
        self,
        tracer: Tracer,
        verb: str,
        name: str,
        arena: Arena,
        ranks: tuple[int, ...],
        layout: ChunkLayout,
    ) -> None:
        super().__init__(arena, ranks, layout)
        self._tracer, self._verb, self._name = tracer, verb, name
        self._nbytes = layout.numel * layout.dtype.itemsize
        self._begun: dict[int, tuple[int, tuple[int, ...]]] = {}

    def begin(
        self, step: int, targets: tuple[int, ...], handle: SharedMemoryHandle | None = None
    ) -> None:
        """Announce a step, and remember when it began and for which ranks."""
        self._begun[step & 1] = time.monotonic_ns(), targets
        super().begin(step, targets, handle)

    def try_send(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Send a tensor of one chunk if there is room, and record the transfer."""
        begun = time.monotonic_ns()
        sent = super().try_send(step, targets, tensor)
        if sent:
            self._begun[step & 1] = begun, targets
            self._record(step)
        return sent

    def publish(self, step: int, chunks: int) -> None:
        """Publish chunks of a step; with the last one, record the transfer."""
        super().publish(step, chunks)
        if chunks == self.layout.num_chunks:
            self._record(step)

    def _record(self, step: int) -> None:
        begun, targets = self._begun[step & 1]
        now = time.monotonic_ns()
        for target in targets:
            self._tracer.record_transfer(
                "send", self._verb, self._name, target, self._nbytes, begun, now, step
            )


class TracedReceiveRingBuffer(ReceiveRingBuffer):
    """Receive ring buffer that records each tensor read from it in the timeline.

    Args:
        tracer: The timeline's tracer.
        peer: The sender.
        verb: The verb that exchanges through the ring.
        name: The name under which it does so.
        view: The peer's memory; this and what follows are as for :class:`ReceiveRingBuffer`.
        offset: Where in it the ring begins.
        ranks: The ranks of the machine.
        rank: This rank.
        layout: How its tensors are split into chunks.

    Attributes:
        last_read: The step that was read last, when that began, and when it was over.
    """

    def __init__(
        self,
        tracer: Tracer,
        peer: int,
        verb: str,
        name: str,
        view: MappedChunk,
        offset: int,
        ranks: tuple[int, ...],
        rank: int,
        layout: ChunkLayout,
    ) -> None:
        super().__init__(view, offset, ranks, rank, layout)
        self._tracer, self._peer, self._verb, self._name = tracer, peer, verb, name
        self._nbytes = layout.numel * layout.dtype.itemsize
        self._begun: dict[int, int] = {}
        self.last_read = (-1, 0, 0)

    def read_whole(self, step: int) -> torch.Tensor | None:
        """Return a one-chunk tensor if it is published, and note when its reading began."""
        found = super().read_whole(step)
        if found is not None:
            self._begun.setdefault(step, time.monotonic_ns())
        return found

    def tensor_handle(self, step: int) -> SharedMemoryHandle | None:
        """Return a handle to the tensor of a step, and note that its reading begins."""
        self._begun.setdefault(step, time.monotonic_ns())
        return super().tensor_handle(step)

    def read_begun(self, step: int) -> int:
        """Return when the unfinished reading of a step began; the present time if it has not."""
        return self._begun.get(step, time.monotonic_ns())

    def acknowledge(self, step: int, chunks: int) -> None:
        """Acknowledge chunks of a step; with the last one, record the transfer."""
        over = chunks == self.layout.num_chunks
        begun = self._begun.pop(step, None) if over else None
        if begun is not None and self.published(step) == chunks:  # a failed peer publishes fewer
            now = time.monotonic_ns()
            self.last_read = step, begun, now
            self._tracer.record_transfer(
                "read", self._verb, self._name, self._peer, self._nbytes, begun, now, step
            )
        super().acknowledge(step, chunks)


class WaitTracer:
    """Tracer of one thread's wait for an operation: which peers were missing, and for how long.

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


def trace_transfer(
    tracer: Tracer,
    kind: str,
    exchange: ExchangeRequest,
    peer: int,
    nbytes: int,
    begun: int,
    request: Request | None,
) -> Request | None:
    """Record one message of an exchange in the timeline: now, or once its transfer has ended."""
    (name, step), verb = exchange.key, exchange.signature.verb

    def record() -> None:
        """Record the transfer, which has ended."""
        tracer.record_transfer(kind, verb, name, peer, nbytes, begun, time.monotonic_ns(), step)

    if request is not None:
        return TracedRequest(request, record)
    record()
    return None


def trace_collective(tracer: Tracer, exchange: ExchangeRequest, ranks: int, begun: int) -> None:
    """Record a collective that has just ended in the timeline."""
    signature = exchange.signature
    sizes = [size for size in signature.shape if size is not None]
    nbytes = math.prod(sizes) * getattr(torch, signature.dtype).itemsize
    verb = signature.verb.partition("(")[0].partition(" ")[0]
    args = {"verb": verb, "name": exchange.key.name, "bytes": nbytes, "ranks": ranks}
    tracer.record(
        Span("collective", "collective", TRANSFER_TRACK, begun, time.monotonic_ns(), args)
    )


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
