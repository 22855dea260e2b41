"""Pool of GPU buffers that peers map by CUDA IPC, into which exported tensors are copied.

Freeing memory by ``cudaFree`` while a peer has it mapped is undefined behaviour in CUDA. Buffers
are therefore kept until all importers have closed them. Users' own tensors are not exported:
``torch.cuda.empty_cache()``, which has no hook and also begins each graph capture, would free their
memory while peers have it mapped. A copy within a GPU is cheap compared with one between GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from asyncddp.device.stream_interfaces import (
    DeviceEvent,
    DeviceStreams,
    InterprocessEvent,
    StreamRole,
)
from asyncddp.tensors.free_list import FreeList
from asyncddp.transport.cuda.ipc.ipc_messages import ALL_MEMORY

_MIN_BUFFER_BYTES = 1 << 12  # bytes of a buffer


@dataclass(eq=False)
class EventPair:
    """Pair of reused CUDA events: "memory is ready to be read", and "the peer has read it".

    An event is recorded again only after the other rank has made a stream wait for it: the ready
    event after the done message, the read event after the pair's next ready message, which follows
    :meth:`free`.
    """

    number: int  # by which the peer identifies the pair
    ready: InterprocessEvent  # ours, after which the memory can be read
    home: list[EventPair]  # the free pairs, to which it returns
    answered: bool = False  # True once the done message has come
    handle: bytes = b""  # of the peer's event
    read_event: DeviceEvent | None = None  # the peer's, after which the memory has been read

    def free(self, streams: DeviceStreams) -> None:
        """Make the compute stream wait for the peer's read, and free the pair for reuse."""
        if self.read_event is not None:
            streams.wait_event(StreamRole.COMPUTE, self.read_event)
        self.answered = False
        self.home.append(self)


@dataclass(eq=False)
class ExportedMemory:
    """Block of GPU memory that other processes can map and read by CUDA IPC."""

    memory: torch.Tensor  # the bytes of a whole storage
    memory_id: int  # by which peers identify it
    importers: set[int] = field(default_factory=set)  # peers that may map it
    reads: list[EventPair] = field(default_factory=list)  # acknowledged, but not waited for yet
    pending_acks: int = 0  # done messages to come

    def token(self, peer: int, streams: DeviceStreams) -> bytes:
        """Return a token that lets a peer import the memory; empty if the peer has one already."""
        if peer in self.importers:
            return b""
        token = streams.export_memory(self.memory)
        self.importers.add(peer)
        return token


class ExportedMemoryPool:
    """Pool of GPU buffers of one rank that peers map and read by CUDA IPC.

    ``request_close`` asks a peer to close the memory with a given id.
    """

    def __init__(self, streams: DeviceStreams, request_close: Callable[[int, int], None]) -> None:
        self._streams, self._request_close = streams, request_close
        self._memory_ids = itertools.count()
        self.buffers = FreeList(self._allocate, oldest_first=True)  # peers have time to read
        self.retired: dict[int, ExportedMemory] = {}  # by id, until all importers have closed it
        self.left: set[int] = set()  # peers that import nothing any more

    def take(self, size: int, pending_acks: int) -> ExportedMemory:
        """Take a buffer of at least ``size`` bytes, which the compute stream may write.

        It is free again after ``pending_acks`` done messages.
        """
        buffer = self.buffers.take(max(_MIN_BUFFER_BYTES, 1 << max(0, size - 1).bit_length()))
        self._wait_for_reads(buffer)
        buffer.pending_acks = pending_acks
        return buffer

    def _allocate(self, size: int) -> ExportedMemory:
        return ExportedMemory(self._streams.allocate_exportable(size), next(self._memory_ids))

    def acknowledge(self, buffer: ExportedMemory, event_pair: EventPair) -> None:
        """Record that a peer has enqueued its read of a buffer."""
        buffer.reads.append(event_pair)
        buffer.pending_acks -= 1
        if buffer.pending_acks:
            return
        if not self.buffers.give(buffer, buffer.memory.nbytes):
            self._wait_for_reads(buffer)
            self._retire(buffer)

    def confirm_closed(self, peer: int, memory_id: int) -> None:
        """Record that a peer has closed one memory block, or all of them."""
        if memory_id == ALL_MEMORY:
            self.left.add(peer)
        for number, exported in list(self.retired.items()):
            if memory_id in (number, ALL_MEMORY):
                exported.importers.discard(peer)
                if not exported.importers:
                    del self.retired[number]

    def close(self) -> None:
        """Free all buffers."""
        self.buffers.clear()
        self.retired.clear()

    def _wait_for_reads(self, buffer: ExportedMemory) -> None:
        for event_pair in buffer.reads:
            event_pair.free(self._streams)
        buffer.reads.clear()

    def _retire(self, exported: ExportedMemory) -> None:
        """Ask importers to close unused memory, and keep it until they have closed it."""
        exported.importers -= self.left
        if exported.importers:
            self.retired[exported.memory_id] = exported
        for peer in exported.importers:
            self._request_close(peer, exported.memory_id)
