"""Tracing of the progress engine: records transfers, collectives and averages in the timeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.shm.ring_buffer import ReceiveRingBuffer, SendRingBuffer
from asyncddp.timeline.chrome_trace import Span
from asyncddp.timeline.tracer import Tracer
from asyncddp.timeline.tracks import TRANSFER_TRACK
from asyncddp.transport.base import Request


class EngineTracing:
    """Hooks of the progress engine, which record timeline events if tracing is on."""

    def __init__(self, tracer: Tracer | None) -> None:
        self.tracer = tracer

    def transfer(
        self,
        kind: str,
        key: MatchKey,
        verb: str,
        peer: int,
        nbytes: int,
        begun: int,
        request: Request | None,
    ) -> Request | None:
        """Record the transfer of one tensor: now, or once its request has completed."""
        tracer = self.tracer
        if tracer is None:
            return request
        name, step = key

        def record() -> None:
            tracer.record_transfer(kind, verb, name, peer, nbytes, begun, time.monotonic_ns(), step)

        if request is not None:
            return TracedRequest(request, record)
        record()
        return None

    def collective(
        self, name: str, signature: ExchangeSignature, ranks: Sequence[int], begun: int
    ) -> None:
        """Record a collective that has just ended."""
        if self.tracer is None:
            return
        sizes = [size for size in signature.shape if size is not None]
        nbytes = math.prod(sizes) * getattr(torch, signature.dtype).itemsize
        verb = signature.verb.partition("(")[0].partition(" ")[0]
        args = {"verb": verb, "name": name, "bytes": nbytes, "ranks": len(ranks)}
        now = time.monotonic_ns()
        self.tracer.record(Span("collective", "collective", TRANSFER_TRACK, begun, now, args))

    def average(
        self, verb: str, name: str, begun: int, chunk: torch.Tensor, sources: tuple[int, ...]
    ) -> None:
        """Record that a chunk has just been averaged with the chunks of its sources."""
        if self.tracer is not None:
            now, nbytes = time.monotonic_ns(), chunk.nbytes
            self.tracer.record_mix(verb, name, begun, now, nbytes, sources)

    def send_ring(self, verb: str, name: str) -> Callable[..., SendRingBuffer]:
        """Return a factory of send ring buffers for a verb and name, with tracing if it is on."""
        if self.tracer is None:
            return SendRingBuffer
        record = partial(self.tracer.record_transfer, "send", verb, name)
        return partial(TracedSendRingBuffer, record)

    def receive_ring(self, verb: str, name: str, peer: int) -> Callable[..., ReceiveRingBuffer]:
        """Return a factory of receive ring buffers for a verb, name and peer, traced if tracing."""
        if self.tracer is None:
            return ReceiveRingBuffer
        record = partial(self.tracer.record_transfer, "read", verb, name, peer)
        return partial(TracedReceiveRingBuffer, record)


NO_TRACING = EngineTracing(None)


class TracedRequest:
    """Wrapper of a transport's request that records its transfer once it has completed."""

    def __init__(self, request: Request, record: Callable[[], None]) -> None:
        self._request = request
        self._record: Callable[[], None] | None = record

    @property
    def moves(self) -> int:
        """The request's progress count; 0 if it does not count."""
        return getattr(self._request, "moves", 0)

    def done(self) -> bool:
        """Return whether the request has completed."""
        completed = self._request.done()
        if completed and self._record is not None:
            record, self._record = self._record, None
            record()
        return completed

    def abandon(self) -> None:
        """Abandon the request; nothing is recorded."""
        self._record = None
        self._request.abandon()


class TracedSendRingBuffer(SendRingBuffer):
    """Send ring buffer that records each send of a tensor to a reader in the timeline."""

    def __init__(self, record: Callable[[int, int, int, int, int], None], *details: Any) -> None:
        super().__init__(*details)
        layout = self.layout
        self._record, self._nbytes = record, layout.numel * layout.dtype.itemsize
        self._begun: dict[int, tuple[int, tuple[int, ...]]] = {}

    @override
    def begin(
        self, step: int, targets: tuple[int, ...], handle: SharedMemoryHandle | None = None
    ) -> None:
        self._begun[step & 1] = time.monotonic_ns(), targets
        super().begin(step, targets, handle)

    @override
    def try_send(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        begun = time.monotonic_ns()
        sent = super().try_send(step, targets, tensor)
        if sent:
            self._begun[step & 1] = begun, targets
            self._record_step(step)
        return sent

    @override
    def publish(self, step: int, chunks: int) -> None:
        super().publish(step, chunks)
        if chunks == self.layout.num_chunks:
            self._record_step(step)

    def _record_step(self, step: int) -> None:
        begun, targets = self._begun[step & 1]
        now = time.monotonic_ns()
        for target in targets:
            self._record(target, self._nbytes, begun, now, step)


class TracedReceiveRingBuffer(ReceiveRingBuffer):
    """Receive ring buffer that records each read of a tensor in the timeline."""

    def __init__(self, record: Callable[[int, int, int, int], None], *details: Any) -> None:
        super().__init__(*details)
        layout = self.layout
        self._record, self._nbytes = record, layout.numel * layout.dtype.itemsize
        self._begun: dict[int, int] = {}
        self.last_read = (-1, 0, 0)  # the last step, when reading it began, and when it was over

    @override
    def read_whole(self, step: int) -> torch.Tensor | None:
        found = super().read_whole(step)
        if found is not None:
            self._begun.setdefault(step, time.monotonic_ns())
        return found

    @override
    def tensor_handle(self, step: int) -> SharedMemoryHandle | None:
        self._begun.setdefault(step, time.monotonic_ns())
        return super().tensor_handle(step)

    def read_begun(self, step: int) -> int:
        """Return the time at which the read of a step began; the current time before it begins."""
        return self._begun.get(step, time.monotonic_ns())

    @override
    def acknowledge(self, step: int, chunks: int) -> None:
        over = chunks == self.layout.num_chunks
        begun = self._begun.pop(step, None) if over else None
        if begun is not None and self.published(step) == chunks:  # a failed peer publishes fewer
            self.last_read = step, begun, time.monotonic_ns()
            self._record(self._nbytes, begun, self.last_read[2], step)
        super().acknowledge(step, chunks)
