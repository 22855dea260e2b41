"""Edges of a window to its neighbours: shared memory within a machine, else messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch

from asyncddp.shm.arena import OwnedChunk
from asyncddp.shm.buddy_allocator import AllocatedBlock
from asyncddp.windows.edge import EdgeReader, EdgeWriter, RefCountedBuffer
from asyncddp.windows.shared_memory_edge import SharedMemoryReader, SharedMemoryWriter
from asyncddp.windows.staging import UndeliveredMessage, scalar_for

ControlWords: TypeAlias = dict[int, AllocatedBlock[OwnedChunk]]
"""By out-neighbour of this machine, memory for the words of the edges of its puts and its gets."""


class WindowEdges:
    """Edges of one rank's window: the writer to, and the reader from, each neighbour rank."""

    def __init__(self, control_words: ControlWords) -> None:
        self.control_words = control_words  # of edges to ranks of this machine
        self.outgoing: dict[int, EdgeWriter] = {}  # of this rank's puts and accumulates
        self.incoming: dict[int, EdgeReader] = {}  # of others' puts and accumulates
        self.get_writers: dict[int, SharedMemoryWriter] = {}  # of the tensor that others may get
        self.get_readers: dict[int, SharedMemoryReader] = {}  # of those that this rank may get
        self.remote_get_received = False  # a rank on another machine has got something
        self._offered: tuple[RefCountedBuffer, float] | None = None

    @property
    def is_read_by_gets(self) -> bool:
        """True if a neighbour has ever got something, so that updates are published for gets."""
        edges = self.get_writers.values()
        return self.remote_get_received or any([edge.reader_gets() for edge in edges])

    def send(
        self,
        buffer: RefCountedBuffer,
        weights: Mapping[int, float],
        clock: int,
        p: float,
        acquire_buffer: Callable[[], RefCountedBuffer] | None,
    ) -> list[UndeliveredMessage]:
        """Publish to neighbours, and the step count to all; return the messages that were sent.

        It is added to what they have not taken where ``acquire_buffer`` returns buffers for sums.
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
        self, buffer: RefCountedBuffer, weight: float, clock: int
    ) -> tuple[UndeliveredMessage, ...]:
        """Publish ``weight * buffer``, of some step, for gets; no message is sent."""
        buffer.hold()
        before, self._offered = self._offered, (buffer, weight)
        if before is not None:
            before[0].drop()
        for edge in self.get_writers.values():
            edge.put(buffer, weight, 0.0, clock)
        return ()

    def copy_for_get(self) -> torch.Tensor | None:
        """Return a copy of what neighbours may get; called by any thread."""
        while offered := self._offered:
            buffer, weight = offered
            buffer.hold()
            try:
                if offered is self._offered:  # else it may have been used anew meanwhile
                    return buffer.tensor * scalar_for(buffer.tensor, weight)
            finally:
                buffer.drop()
        return None
