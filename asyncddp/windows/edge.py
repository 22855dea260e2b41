"""Interfaces of a window edge, along which a rank publishes tensors to a neighbour."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from asyncddp.shm.arena import SharedMemoryHandle


class RefCountedBuffer:
    """Reference-counted tensor that a window publishes: written once, then unchanged while in use.

    ``place`` is its location in shared memory, None if it is not shared, and ``holds`` counts the
    references by threads and messages of this rank.
    """

    counting = threading.Lock()  # held while references are counted, or free buffers are sought

    def __init__(self, tensor: torch.Tensor, place: SharedMemoryHandle | None) -> None:
        self.tensor, self.place, self.holds = tensor, place, 0

    def hold(self) -> None:
        """Add a reference: the values stay unchanged."""
        with self.counting:
            self.holds += 1

    def drop(self) -> None:
        """Drop a reference."""
        with self.counting:
            self.holds -= 1


AcquireBuffer: TypeAlias = Callable[[], RefCountedBuffer]
"""Returns a buffer that nobody reads, which is held until it is dropped."""


class PublishedSnapshot(NamedTuple):
    """Tensor published to a neighbour: ``weight * tensor``, and the push-sum weight p."""

    version: int  # number of puts and accumulates along the edge
    floor: int  # the version by which all earlier ones were overwritten; 0 where it adds to them
    weight: float
    p: float
    clock: int  # the writer's step when it published
    time: float  # of publication, in seconds of the reader's monotonic clock
    tensor: torch.Tensor  # it stays unchanged until the reader releases it


class EdgeWriter(ABC):
    """Interface of the writing end of a window edge, which publishes tensors to one neighbour."""

    published = 0  # the version that was published last
    visible_at_once = True  # the reader sees at once what is published

    @abstractmethod
    def put(self, buffer: RefCountedBuffer, weight: float, p: float, clock: int) -> int:
        """Publish ``weight * buffer`` instead of what was published before; return its version."""

    @abstractmethod
    def add(
        self, buffer: RefCountedBuffer, weight: float, p: float, clock: int, acquire: AcquireBuffer
    ) -> int:
        """Publish ``weight * buffer`` added to what is not taken yet; return its version."""

    def set_clock(self, clock: int) -> None:  # noqa: B027 - it goes with the next message
        """Send the reader this rank's step count, at the latest with the next message."""

    def tell(self, clock: int) -> None:
        """Send the reader this rank's step count at once."""
        self.set_clock(clock)

    def arrived(self, version: int) -> bool:
        """Return True if the reader can see a version, or a later one."""
        del version
        return True

    @abstractmethod
    def has_unread(self) -> bool:
        """Return True if the reader is not known to have taken all that was published."""

    @abstractmethod
    def in_use(self) -> Sequence[RefCountedBuffer]:
        """Return the buffers that the reader reads, or may begin to; call after a full fence."""


class EdgeReader(ABC):
    """Interface to read what one neighbour has published for this rank's window.

    What a neighbour published last may be gone with it: reading raises a PeerLeftError then.
    """

    taken = 0  # the version up to which everything was taken

    @abstractmethod
    def look(self) -> PublishedSnapshot | None:
        """Return a snapshot of what was published last; None if it was taken."""

    @abstractmethod
    def take(self) -> PublishedSnapshot | None:
        """Return a snapshot as :meth:`look` does, and mark it as taken: later sums start anew."""

    def release(self) -> None:  # noqa: B027 - a copy needs none
        """Release the snapshot, whose buffer the writer may reuse."""

    @abstractmethod
    def version(self) -> int:
        """Return the version that was published last."""

    @abstractmethod
    def clock(self) -> int:
        """Return the writer's last known step count."""
