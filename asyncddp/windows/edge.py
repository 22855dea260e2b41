"""Interfaces of the writer and the reader of a window's tensors, from one rank to a neighbour."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from asyncddp.shm.arena import SharedMemoryHandle


class RefCountedBuffer:
    """Reference-counted buffer for a published tensor, which stays unchanged while it is in use.

    ``place`` is its location in shared memory, None in private memory. ``holds`` counts the
    references by threads and messages of this rank.
    """

    counting = threading.Lock()  # held while references are counted, or free buffers are sought

    def __init__(self, tensor: torch.Tensor, place: SharedMemoryHandle | None) -> None:
        self.tensor, self.place, self.holds = tensor, place, 0

    def hold(self) -> None:
        """Add a reference, so that the values stay unchanged."""
        with self.counting:
            self.holds += 1

    def drop(self) -> None:
        """Drop a reference."""
        with self.counting:
            self.holds -= 1


AcquireBuffer: TypeAlias = Callable[[], RefCountedBuffer]
"""Returns a buffer that nobody reads, with one reference."""


class PublishedSnapshot(NamedTuple):
    """Snapshot that a reader gets of a published tensor: ``weight * tensor``, and metadata."""

    version: int  # number of puts and accumulates along the edge
    floor: int  # the version by which all earlier ones were overwritten; 0 where it adds to them
    weight: float
    p: float
    clock: int  # the writer's step when it published
    time: float  # of publication, in seconds of the reader's monotonic clock
    tensor: torch.Tensor  # it stays unchanged until the reader releases it


class EdgeWriter(ABC):
    """Interface of the writer that publishes a window's tensors to one neighbour."""

    published = 0  # the version that was published last
    visible_at_once = True  # the reader sees at once what is published

    @abstractmethod
    def put(self, buffer: RefCountedBuffer, weight: float, p: float, clock: int) -> int:
        """Publish ``weight * buffer`` in place of earlier tensors; return the new version."""

    @abstractmethod
    def add(
        self, buffer: RefCountedBuffer, weight: float, p: float, clock: int, acquire: AcquireBuffer
    ) -> int:
        """Publish the sum of ``weight * buffer`` and all not yet taken; return the version."""

    def set_clock(self, clock: int) -> None:  # noqa: B027 - it goes with the next message
        """Pass this rank's step count to the reader, at the latest with the next message."""

    def tell(self, clock: int) -> None:
        """Send this rank's step count to the reader immediately."""
        self.set_clock(clock)

    def arrived(self, version: int) -> bool:
        """Return whether the reader can see a version, or a later one."""
        del version
        return True

    @abstractmethod
    def has_unread(self) -> bool:
        """Return whether the reader may have left published tensors untaken."""

    @abstractmethod
    def in_use(self) -> Sequence[RefCountedBuffer]:
        """Return the buffers that the reader reads or may begin to read; fence fully before."""


class EdgeReader(ABC):
    """Interface of the reader of the tensors that one neighbour publishes in a window.

    If a neighbour has exited, its last tensor may be lost; reading then raises a PeerLeftError.
    """

    taken = 0  # the version up to which everything was taken

    @abstractmethod
    def look(self) -> PublishedSnapshot | None:
        """Return a snapshot of the newest tensor; None if it was taken already."""

    @abstractmethod
    def take(self) -> PublishedSnapshot | None:
        """Return the same as :meth:`look`, and mark it as taken: later sums exclude it."""

    def release(self) -> None:  # noqa: B027 - a copy needs none
        """Release the snapshot, whose buffer the writer may reuse."""

    @abstractmethod
    def version(self) -> int:
        """Return the newest published version."""

    @abstractmethod
    def clock(self) -> int:
        """Return the writer's last known step count."""
