"""Factory of a window's edges to neighbours: shared memory within a machine, else messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from asyncddp.context import Context
from asyncddp.shm.arena import OwnedChunk, SharedMemoryHandle, handle_of_block
from asyncddp.shm.buddy_allocator import AllocatedBlock
from asyncddp.windows.edge import EdgeReader, EdgeWriter
from asyncddp.windows.message_edge import TAKEN, MessageReader, MessageWriter
from asyncddp.windows.shared_memory_edge import WORDS, SharedMemoryReader, SharedMemoryWriter

_EDGE_BYTES = 16 * WORDS  # bytes of the words of both edges to a peer


class WindowEdges(NamedTuple):
    """Writers to and readers from the neighbours of a rank's window, keyed by rank.

    Attributes:
        outgoing: Writers of this rank's puts and accumulates.
        incoming: Readers of others' puts and accumulates.
        get_writers: Writers of the tensor that others may get.
        get_readers: Readers of the tensors that others let this rank get.
    """

    outgoing: dict[int, EdgeWriter]
    incoming: dict[int, EdgeReader]
    get_writers: dict[int, EdgeWriter]
    get_readers: dict[int, SharedMemoryReader]


class MessageSender(Protocol):
    """Interface of the function that sends a message about a window to a peer."""

    def __call__(self, peer: int, *content: object) -> None:
        """Send a message: the window's number, a word, and what belongs to it."""
        ...


class EdgeFactory:
    """Factory of a window's edges to neighbours, in shared memory where the neighbour can map it.

    Args:
        context: The rank's context.
        service: The name under which the engine hands messages to the window manager.
        send: Sends a message to a peer's window manager.
    """

    def __init__(self, context: Context, service: str, send: MessageSender) -> None:
        self._engine, self._service, self._send = context.engine, service, send
        self._group = context.transport.window_group

    def reserve(
        self, targets: Iterable[int]
    ) -> tuple[
        dict[int, tuple[SharedMemoryHandle, SharedMemoryHandle]],
        dict[int, AllocatedBlock[OwnedChunk]],
    ]:
        """Reserve shared memory for the control words of the edges to ranks of this machine.

        Returns:
            Where the two edges to each of them begin, for the others; and the same for
            :meth:`make`.
        """
        places, own = {}, {}
        for target in targets:
            if self._group is not None and target in self._group.processes:
                block = own[target] = self._group.arena.take(_EDGE_BYTES, zeroed=_EDGE_BYTES)
                first = handle_of_block(block)
                places[target] = first, first._replace(offset=first.offset + 8 * WORDS)
        return places, own

    def release(self, blocks: Iterable[AllocatedBlock[OwnedChunk]]) -> None:
        """Free the control words of edges."""
        for block in blocks:
            if self._group is not None:
                self._group.arena.give(block)

    def make(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        targets: Sequence[int],
        sources: Mapping[int, tuple[SharedMemoryHandle, SharedMemoryHandle] | None],
        own: Mapping[int, AllocatedBlock[OwnedChunk]],
        what: str,
    ) -> WindowEdges:
        """Make the edges of a window.

        Args:
            number: The window's number.
            shape: The shape of its tensor.
            dtype: Its dtype.
            targets: Out-neighbours.
            sources: In-neighbours, and the places of their control words in shared memory, if any.
            own: The second result of :meth:`reserve`.
            what: How messages begin that name a neighbour.

        Raises:
            PeerLeftError: The memory of a neighbour on this machine cannot be read.
        """
        edges = WindowEdges({}, {}, {}, {})
        for peer in targets:
            if peer in own:
                chunk, first = own[peer].chunk, own[peer].offset
                edges.outgoing[peer] = SharedMemoryWriter(chunk, first)
                edges.get_writers[peer] = SharedMemoryWriter(chunk, first + 8 * WORDS)
            else:
                edges.outgoing[peer] = MessageWriter(self._engine, peer, self._service, number)
        for peer, places in sources.items():
            if places is not None and self._group is not None:
                tensor = shape, dtype, f"{what} {peer}"
                process, arena = self._group.processes[peer], self._group.arena
                edges.incoming[peer] = SharedMemoryReader(arena, process, places[0], *tensor)
                edges.get_readers[peer] = SharedMemoryReader(arena, process, places[1], *tensor)
            else:
                edges.incoming[peer] = MessageReader(partial(self._send, peer, number, TAKEN))
        return edges
