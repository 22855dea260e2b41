"""The two ends of an edge: what a writer may do, and what a reader sees."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from asyncddp.memory.shared import Place

__all__ = ["Buffer", "Incoming", "Outgoing", "Shown"]


class Buffer:
    """A tensor that readers may be reading: written once, then left alone while it is in use.

    Attributes:
        tensor: The values.
        place: Where peers on this machine find them, if they can.
        holds: How many threads and messages of this rank need them.
    """

    counting = threading.Lock()
    """Held while holds are counted, or looked at to find room."""

    def __init__(self, tensor: torch.Tensor, place: Place | None) -> None:
        self.tensor, self.place, self.holds = tensor, place, 0

    def hold(self) -> None:
        """Keep the values as they are."""
        with self.counting:
            self.holds += 1

    def drop(self) -> None:
        """Need them no more."""
        with self.counting:
            self.holds -= 1


class Shown(NamedTuple):
    """One version of what a writer has published along an edge: ``weight * tensor``, and its p.

    Attributes:
        version: Counts what the writer has done along the edge.
        floor: The version by which all earlier ones were overwritten; 0 where it adds to them.
        weight: Factor of the tensor.
        p: The associated scalar, of push-sum.
        clock: The writer's step when it published.
        time: When, in seconds of the reader's monotonic clock.
        tensor: The values; they stay as they are until the reader lets go.
    """

    version: int
    floor: int
    weight: float
    p: float
    clock: int
    time: float
    tensor: torch.Tensor


class Outgoing(ABC):
    """The writer's end of an edge."""

    _version = 0

    @abstractmethod
    def put(self, buffer: Buffer, weight: float, p: float, clock: int) -> int:
        """Publish ``weight * buffer`` in place of all that was published before.

        Returns:
            The version, for :meth:`arrived`.
        """

    @abstractmethod
    def add(
        self, buffer: Buffer, weight: float, p: float, clock: int, room: Callable[[], Buffer]
    ) -> int:
        """Publish ``weight * buffer`` beside what the reader has not taken yet.

        Args:
            buffer: Values.
            weight: Their factor.
            p: The associated scalar.
            clock: The writer's step.
            room: Gives a buffer for a sum, where one has to be formed.

        Returns:
            The version, for :meth:`arrived`.
        """

    @abstractmethod
    def tick(self, clock: int) -> None:
        """Tell the reader how many steps the writer has made."""

    def tell(self, clock: int) -> None:
        """The same, also where it takes a message of its own."""
        self.tick(clock)

    prompt = True
    """Whether the reader can see at once what is published."""

    @property
    def published(self) -> int:
        """The version that was published last; 0 before the first."""
        return self._version

    def arrived(self, version: int) -> bool:
        """Whether the reader can see a version, or a later one."""
        del version
        return True

    def wanted(self) -> bool:
        """Whether the reader has said that it looks."""
        return False

    @abstractmethod
    def untaken(self) -> bool:
        """Whether the reader is not known to have taken all that was published."""

    @abstractmethod
    def in_use(self) -> Sequence[Buffer]:
        """Buffers that the reader reads, or may begin to; ask after a :func:`full_fence`."""


class Incoming(ABC):
    """The reader's end of an edge. What it has shown stays as it is until :meth:`release`."""

    taken = 0
    """The version up to which everything was taken."""

    @abstractmethod
    def look(self) -> Shown | None:
        """What was published last, if it was not taken yet.

        Raises:
            PeerLeftError: It cannot be read any more.
        """

    @abstractmethod
    def take(self) -> Shown | None:
        """Look, and count what is seen as taken: what comes later is not added to it.

        Raises:
            PeerLeftError: It cannot be read any more.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of what was seen."""

    @abstractmethod
    def version(self) -> int:
        """The version that was published last."""

    @abstractmethod
    def clock(self) -> int:
        """How many steps the writer has made, as far as is known here."""
