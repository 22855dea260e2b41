"""Writers and readers of a window, for its neighbours on this machine and on others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from asyncddp.shm.arena import OwnedChunk
from asyncddp.shm.buddy_allocator import AllocatedBlock
from asyncddp.windows.edge import AcquireBuffer, EdgeReader, EdgeWriter, RefCountedBuffer
from asyncddp.windows.shared_memory_edge import SharedMemoryReader, SharedMemoryWriter
from asyncddp.windows.staging import UndeliveredMessage

ControlWords: TypeAlias = dict[int, AllocatedBlock[OwnedChunk]]
"""Memory for the words of the edges of puts and gets, by out-neighbour on this machine."""


class OfferedTensor(NamedTuple):
    """Tensor that a rank has published for gets: ``weight * buffer``, and its push-sum weight p.

    ``time`` is the time of publication, in seconds of this process's monotonic clock.
    """

    buffer: RefCountedBuffer
    weight: float
    p: float
    time: float


class WindowEdges:
    """Writers and readers of one rank's window: one per out-neighbour, and one per in-neighbour."""

    def __init__(self, control_words: ControlWords) -> None:
        self.control_words = control_words  # of edges to ranks of this machine
        self.outgoing: dict[int, EdgeWriter] = {}  # of this rank's puts and accumulates
        self.incoming: dict[int, EdgeReader] = {}  # of others' puts and accumulates
        self.get_writers: dict[int, SharedMemoryWriter] = {}  # of the tensor that others may get
        self.get_readers: dict[int, SharedMemoryReader] = {}  # of those that this rank may get
        self.remote_get_received = False  # a rank on another machine has got something
        self.lent: dict[tuple[int, int], RefCountedBuffer] = {}  # by reader and ticket
        self._offered: OfferedTensor | None = None

    @property
    def is_read_by_gets(self) -> bool:
        """True if a neighbour has ever used a get, so that updates are published for gets."""
        edges = self.get_writers.values()
        return self.remote_get_received or any([edge.reader_gets() for edge in edges])

    def send(
        self,
        buffer: RefCountedBuffer,
        weights: Mapping[int, float],
        clock: int,
        p: float,
        acquire_buffer: AcquireBuffer | None,
    ) -> list[UndeliveredMessage]:
        """Publish a buffer to neighbours with weights, and the step count to all neighbours.

        With ``acquire_buffer``, which returns buffers for sums, it is added to the tensors that
        they have not taken yet. Returns the sent messages.
        """
        messages: list[UndeliveredMessage] = []
        for peer, edge in self.outgoing.items():
            weight = weights.get(peer)
            if weight is None:
                edge.set_clock(clock)
                continue
            if acquire_buffer is None:
                version = edge.put(buffer, weight, p * weight, clock)
            else:
                version = edge.add(buffer, weight, p * weight, clock, acquire_buffer)
            if not edge.visible_at_once:
                messages.append((peer, partial(edge.arrived, version)))
        return messages

    def publish_for_gets(
        self, buffer: RefCountedBuffer, weight: float, clock: int, p: float = 1.0
    ) -> tuple[UndeliveredMessage, ...]:
        """Publish ``weight * buffer`` for gets, without sending a message.

        ``p`` is the push-sum weight that biases the buffer, and ``clock`` this rank's step count.
        """
        buffer.hold()
        offered = OfferedTensor(buffer, weight, p, time.monotonic())
        before, self._offered = self._offered, offered
        if before is not None:
            before.buffer.drop()
        for edge in self.get_writers.values():
            edge.put(buffer, weight, 0.0, clock)
        return ()

    def hold_offered(self) -> OfferedTensor | None:
        """Return the tensor offered for gets, with a reference to its buffer; from any thread."""
        while offered := self._offered:
            offered.buffer.hold()
            if offered is self._offered:
                return offered
            offered.buffer.drop()  # it may have been used anew meanwhile
        return None

    def take_back(self, is_lost: Callable[[int], bool]) -> None:
        """Release the buffers that were lent to ranks which have been lost since."""
        for key in [key for key in self.lent if is_lost(key[0])]:
            self.lent.pop(key).drop()
