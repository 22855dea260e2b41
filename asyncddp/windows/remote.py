"""An edge to another machine: what is published travels by message, at most one at a time.

While one is on its way, what comes next waits at the writer, where a later put takes its place and
a later sum is added to it: a slow wire makes readers see fewer versions, and never makes a writer
wait or its memory grow. The reader's engine lays down what arrives, on whichever thread drives it,
and says so to the writer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncddp.engine import Engine
from asyncddp.memory.allocate import empty
from asyncddp.windows.contract import Buffer, Incoming, Outgoing, Shown
from asyncddp.windows.sums import weighted

__all__ = ["ADD", "ARRIVED", "PUT", "TAKEN", "TICK", "Inbox", "Outbox", "Question"]

PUT, ADD, ARRIVED, TAKEN, TICK = "put", "add", "arrived", "taken", "tick"


class Question:
    """What this rank wants to know of a peer's own tensor.

    Attributes:
        answer: What came, once it has come.
    """

    answer: Shown | None = None


class _Letter:
    """What is to travel, or travels."""

    def __init__(
        self, kind: str, buffer: Buffer, weight: float, p: float, clock: int, version: int
    ) -> None:
        self.kind, self.buffer, self.weight, self.p = kind, buffer, weight, p
        self.clock, self.version = clock, version
        buffer.hold()

    def drop(self) -> None:
        """It is not read any more."""
        self.buffer.drop()


class Outbox(Outgoing):
    """The writer's end.

    Args:
        engine: Sends and hears.
        peer: The reader.
        service: Under which the windows of all ranks are reached.
        window: The window's number.
    """

    prompt = False

    def __init__(self, engine: Engine, peer: int, service: str, window: int) -> None:
        self._engine, self._peer, self._address = engine, peer, (service, window)
        self._version = self._arrived = self._taken = 0
        self._sent: _Letter | None = None
        self._next: _Letter | None = None

    def put(self, buffer: Buffer, weight: float, p: float, clock: int) -> int:
        """Send it, or let it wait in place of what waits."""
        with self._engine.parcels():
            self._version += 1
            if self._next is not None:
                self._next.drop()
            self._next = _Letter(PUT, buffer, weight, p, clock, self._version)
            self._go_on()
            return self._version

    def add(
        self, buffer: Buffer, weight: float, p: float, clock: int, room: Callable[[], Buffer]
    ) -> int:
        """Send it, or let it wait, added to what waits."""
        with self._engine.parcels():
            self._version += 1
            before, kind = self._next, ADD
            if before is not None:
                total = room()
                terms = [(before.buffer.tensor, before.weight), (buffer.tensor, weight)]
                weighted(total.tensor, terms)
                before.drop()
                buffer, weight, p, kind = total, 1.0, before.p + p, before.kind
            self._next = _Letter(kind, buffer, weight, p, clock, self._version)
            if before is not None:
                buffer.drop()  # the letter holds it now
            self._go_on()
            return self._version

    def tick(self, clock: int) -> None:
        """The reader hears it with what is published next."""

    def tell(self, clock: int) -> None:
        """Send it."""
        service, window = self._address
        with self._engine.parcels() as parcels:
            parcels.send(self._peer, service, (window, TICK, clock))

    def arrived(self, version: int) -> bool:
        """Whether the reader has said so."""
        return self._arrived >= version

    def hear(self, version: int) -> None:
        """The reader has laid a version down."""
        self._arrived = max(self._arrived, version)
        if self._sent is not None and self._sent.version <= version:
            self._sent.drop()
            self._sent = None
        self._go_on()

    def untaken(self) -> bool:
        """Whether the reader has said less, as far as has come here."""
        return self._taken < self._version

    def hear_taken(self, version: int) -> None:
        """The reader has taken a version."""
        self._taken = max(self._taken, version)

    def in_use(self) -> Sequence[Buffer]:
        """None beyond those that are held."""
        return ()

    def _go_on(self) -> None:
        """Send what waits, if nothing is on its way."""
        if self._sent is not None or self._next is None:
            return
        letter, self._next = self._next, None
        self._sent = letter
        service, window = self._address
        content = (window, letter.kind, letter.weight, letter.p, letter.clock, letter.version)
        with self._engine.parcels() as parcels:
            parcels.send(self._peer, service, content, letter.buffer.tensor)


class Inbox(Incoming):
    """The reader's end, in the reader's own memory.

    Args:
        tell: Tells the writer which version was taken.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._lock, self._tell = threading.Lock(), tell
        self._shown: Shown | None = None
        self._clock = 0
        self.taken = 0

    def receive(self, kind: str, facts: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Lay down what has come; called by the engine."""
        weight, p, clock, version = facts
        with self._lock:
            known, floor = self._shown, version if kind == PUT else 0
            if kind == ADD and known is not None and known.version > self.taken:
                total = empty(tuple(tensor.shape), tensor.dtype)
                weighted(total, [(known.tensor, known.weight), (tensor, weight)])
                tensor, weight, p, floor = total, 1.0, known.p + p, known.floor
            self._clock = clock
            self._shown = Shown(version, floor, weight, p, clock, time.monotonic(), tensor)

    def look(self) -> Shown | None:
        """What lies here, unless it was taken; a tensor is never changed once it does."""
        shown = self._shown
        return None if shown is None or shown.version <= self.taken else shown

    def take(self) -> Shown | None:
        """The same, and nothing is added to it any more."""
        with self._lock:
            shown = self.look()
            if shown is not None:
                self.taken = shown.version
        if shown is not None:
            self._tell(shown.version)
        return shown

    def release(self) -> None:
        """Nothing is held."""

    def version(self) -> int:
        """The version that has come last."""
        return 0 if self._shown is None else self._shown.version

    def hear_clock(self, clock: int) -> None:
        """The writer has made so many steps."""
        self._clock = clock

    def clock(self) -> int:
        """The writer's step when it published that, or when it told last."""
        return self._clock
