"""Writer and reader of a window's tensors between machines, by one message at a time.

While one message is in flight, the next one waits at the writer, where a later put replaces it and
a later accumulate is added to it. So with a slow network readers see fewer versions, but a writer
never waits, and its memory does not grow. The reader's engine stores what arrives, in whichever
thread drives it, and confirms it to the writer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from asyncddp.engine import ProgressEngine
from asyncddp.kernels.cpu_weighted_sum import weighted_sum
from asyncddp.tensors.allocation import empty
from asyncddp.windows.edge import (
    AcquireBuffer,
    EdgeReader,
    EdgeWriter,
    PublishedSnapshot,
    RefCountedBuffer,
)

PUT, ADD, ARRIVED, TAKEN, TICK = "put", "add", "arrived", "taken", "tick"


class _PendingPut(NamedTuple):
    """Put or accumulate message, queued or in flight; it holds a reference to its buffer."""

    kind: str
    buffer: RefCountedBuffer
    weight: float
    p: float
    clock: int
    version: int


class MessageEdgeWriter(EdgeWriter):
    """Writer that sends a window's tensors as messages to a neighbour on another machine."""

    visible_at_once = False

    def __init__(self, engine: ProgressEngine, send: Callable[..., None]) -> None:
        self._engine, self._send = engine, send
        self._arrived = self._taken = 0
        self._sent: _PendingPut | None = None
        self._next: _PendingPut | None = None

    @override
    def put(self, buffer: RefCountedBuffer, weight: float, p: float, clock: int) -> int:
        with self._engine.active_messages():
            if self._next is not None:
                self._next.buffer.drop()
            return self._enqueue(PUT, buffer, weight, p, clock)

    @override
    def add(
        self, buffer: RefCountedBuffer, weight: float, p: float, clock: int, acquire: AcquireBuffer
    ) -> int:
        with self._engine.active_messages():
            before = self._next
            if before is None:
                return self._enqueue(ADD, buffer, weight, p, clock)
            total = acquire()
            terms = [(before.buffer.tensor, before.weight), (buffer.tensor, weight)]
            weighted_sum(total.tensor, terms)
            before.buffer.drop()
            version = self._enqueue(before.kind, total, 1.0, before.p + p, clock)
            total.drop()  # the message holds it now
            return version

    def _enqueue(
        self, kind: str, buffer: RefCountedBuffer, weight: float, p: float, clock: int
    ) -> int:
        """Queue a message, and send it if none is in flight; return its version."""
        buffer.hold()
        self.published += 1
        self._next = _PendingPut(kind, buffer, weight, p, clock, self.published)
        self._send_next()
        return self.published

    @override
    def tell(self, clock: int) -> None:
        self._send(TICK, clock)

    @override
    def arrived(self, version: int) -> bool:
        return self._arrived >= version

    def handle_arrived(self, version: int) -> None:
        """Handle the reader's confirmation that it has stored a version."""
        self._arrived = max(self._arrived, version)
        if self._sent is not None and self._sent.version <= version:
            self._sent.buffer.drop()
            self._sent = None
        self._send_next()

    @override
    def has_unread(self) -> bool:
        return self._taken < self.published

    def handle_taken(self, version: int) -> None:
        """Handle the reader's notice that it has taken a version."""
        self._taken = max(self._taken, version)

    @override
    def in_use(self) -> Sequence[RefCountedBuffer]:
        return ()  # those being sent are held anyway

    def _send_next(self) -> None:
        if self._sent is not None or self._next is None:
            return
        message = self._sent = self._next
        self._next = None
        kind, buffer, *facts = message
        self._send(kind, *facts, tensor=buffer.tensor)


class MessageEdgeReader(EdgeReader):
    """Reader of a window's tensors, which a neighbour on another machine sends as messages.

    ``tell`` sends the writer the version that was taken.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._lock, self._tell = threading.Lock(), tell
        self._snapshot: PublishedSnapshot | None = None
        self._clock = 0

    def receive(self, kind: str, facts: Sequence[Any], tensor: torch.Tensor) -> None:
        """Store a received tensor, or its sum with the stored one; called by the engine."""
        weight, p, clock, version = facts
        with self._lock:
            known, floor = self._snapshot, version if kind == PUT else 0
            if kind == ADD and known is not None and known.version > self.taken:
                total = empty(tuple(tensor.shape), tensor.dtype)
                weighted_sum(total, [(known.tensor, known.weight), (tensor, weight)])
                tensor, weight, p, floor = total, 1.0, known.p + p, known.floor
            self._clock = clock
            self._snapshot = PublishedSnapshot(
                version, floor, weight, p, clock, time.monotonic(), tensor
            )

    @override
    def look(self) -> PublishedSnapshot | None:
        snapshot = self._snapshot  # whose tensor is never changed
        return None if snapshot is None or snapshot.version <= self.taken else snapshot

    @override
    def take(self) -> PublishedSnapshot | None:
        with self._lock:
            snapshot = self.look()
            if snapshot is not None:
                self.taken = snapshot.version
        if snapshot is not None:
            self._tell(snapshot.version)
        return snapshot

    @override
    def version(self) -> int:
        return 0 if self._snapshot is None else self._snapshot.version

    def handle_clock(self, clock: int) -> None:
        """Store the step count that the writer has sent."""
        self._clock = clock

    @override
    def clock(self) -> int:
        return self._clock
