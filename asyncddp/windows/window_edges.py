"""Edges of a window to its neighbours: shared memory within a machine, else messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from asyncddp.context import Context
from asyncddp.shm.arena import OwnedChunk, SharedMemoryHandle
from asyncddp.shm.buddy_allocator import AllocatedBlock
from asyncddp.windows.edge import EdgeReader, EdgeWriter, RefCountedBuffer
from asyncddp.windows.message_edge import TAKEN, MessageReader, MessageWriter
from asyncddp.windows.shared_memory_edge import WORDS, SharedMemoryReader, SharedMemoryWriter
from asyncddp.windows.staging import UndeliveredMessage, scalar_for

_EDGE_BYTES = 8 * WORDS

ControlWords: TypeAlias = dict[int, AllocatedBlock[OwnedChunk]]
"""By out-neighbour of this machine, memory for the words of the edges of its puts and its gets."""

SendFunction: TypeAlias = Callable[..., list[UndeliveredMessage]]
"""Publishes a buffer as :meth:`WindowEdges.send` does."""


class WindowEdges:
    """Writers to and readers from the neighbours of a rank's window, keyed by rank."""

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
        """Publish to neighbours, and the step count to all; return messages that were sent.

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


class EdgeFactory:
    """Factory of a window's edges to neighbours, in shared memory where the neighbour can map it.

    ``send`` sends a message to the window manager of a peer.
    """

    def __init__(self, context: Context, send: Callable[..., None]) -> None:
        self._engine, self._send = context.engine, send
        self._group = context.transport.window_group

    def reserve(self, targets: Iterable[int]) -> ControlWords:
        """Reserve shared memory for the control words of the edges to ranks of this machine."""
        group = self._group
        if group is None:
            return {}
        near = [target for target in targets if target in group.processes]
        return {peer: group.arena.take(2 * _EDGE_BYTES, zeroed=2 * _EDGE_BYTES) for peer in near}

    def release(self, words: ControlWords) -> None:
        """Free the control words of edges."""
        for block in words.values():
            if self._group is not None:
                self._group.arena.give(block)

    def make(
        self,
        number: int,
        tensor: torch.Tensor,
        targets: Sequence[int],
        sources: Mapping[int, SharedMemoryHandle | None],
        own: ControlWords,
        what: str,
    ) -> WindowEdges:
        """Make the edges of a window, with own control words that :meth:`reserve` has returned.

        Sources come with the places of theirs, if any; ``what`` begins errors that name a source.
        """
        edges = WindowEdges(own)
        for peer in targets:
            if peer in own:
                chunk, first = own[peer].chunk, own[peer].offset
                edges.outgoing[peer] = SharedMemoryWriter(chunk, first)
                edges.get_writers[peer] = SharedMemoryWriter(chunk, first + _EDGE_BYTES)
            else:
                send = partial(self._send, peer, number)
                edges.outgoing[peer] = MessageWriter(self._engine, send)
        for peer, place in sources.items():
            if place is not None and self._group is not None:
                second = place._replace(offset=place.offset + _EDGE_BYTES)
                facts = tuple(tensor.shape), tensor.dtype, f"{what} {peer}"
                process, arena = self._group.processes[peer], self._group.arena
                edges.incoming[peer] = SharedMemoryReader(arena, process, place, *facts)
                edges.get_readers[peer] = SharedMemoryReader(arena, process, second, *facts)
            else:
                edges.incoming[peer] = MessageReader(partial(self._send, peer, number, TAKEN))
        return edges
