"""GPU memory that peers can map by CUDA IPC: pooled buffers, and user tensors sent repeatedly."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncddp.device.streams import DeviceEvent, DeviceStreams, InterprocessEvent, StreamRole
from asyncddp.tensors.free_list import FreeList

logger = logging.getLogger("asyncddp")

_MIN_BUFFER_BYTES = 1 << 12  # bytes of a buffer


@dataclass(eq=False)
class EventPair:
    """Pair of reused CUDA events: one marks memory as ready to read, one as read by the peer.

    Neither is recorded again before the other side has made a stream wait for it: ours not before
    the done message, the peer's not before the pair's next ready message, after :meth:`free`.
    """

    number: int  # by which the peer identifies the pair
    ready: InterprocessEvent  # ours, after which the memory can be read
    home: list[EventPair]  # the free pairs, to which it returns
    read_event: DeviceEvent | None = None  # the peer's, after which the memory has been read
    handle: bytes = b""  # of the peer's event

    def free(self, streams: DeviceStreams) -> None:
        """Make the compute stream wait until the peer has read, and free the pair."""
        if self.read_event is not None:
            streams.wait_event(StreamRole.COMPUTE, self.read_event)
        self.home.append(self)


@dataclass(eq=False)
class ExportedMemory:
    """Block of GPU memory that other processes can map and read by CUDA IPC."""

    memory: torch.Tensor  # the bytes of a whole storage
    memory_id: int  # by which peers identify it
    tokens: dict[int, bytes] = field(default_factory=dict)  # for each peer that was told of it
    reads: list[EventPair] = field(default_factory=list)  # acknowledged, but not waited for yet
    pending_acks: int = 0  # done messages to come

    def token(self, peer: int, streams: DeviceStreams) -> bytes:
        """Return the export token of the memory for one peer."""
        if peer not in self.tokens:
            self.tokens[peer] = streams.export_memory(self.memory)
        return self.tokens[peer]


class _SentStorage(NamedTuple):
    """Record of a user's tensor storage that was sent: where it lies, and how it was exported."""

    weak: StorageWeakRef
    place: tuple[int, int]  # its address and size
    exported: ExportedMemory | None = None
    not_exportable: bool = False


class ExportedMemoryPool:
    """Pool of the GPU memory that one rank lets its peers map and read by CUDA IPC."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._memory_ids = itertools.count()
        self.buffers = FreeList(self._allocate, oldest_first=True)  # peers have time to read
        self._sent_storages: dict[int, _SentStorage] = {}
        self.retired: dict[int, list[int]] = defaultdict(list)  # ids that peers must be told of

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
        """Note that a peer has enqueued its read of a buffer."""
        buffer.reads.append(event_pair)
        buffer.pending_acks -= 1
        if buffer.pending_acks:
            return
        if not self.buffers.give(buffer, buffer.memory.nbytes):
            self._wait_for_reads(buffer)
            self._retire(buffer)

    def export_if_resent(self, data: torch.Tensor, peers: Collection[int]) -> ExportedMemory | None:
        """Export a tensor's storage if it was sent before and can be exported to all these peers.

        Opening memory costs a peer more than one copy, so that what is sent once is copied.
        """
        storage = data.untyped_storage()
        key, place = storage._cdata, (storage.data_ptr(), storage.nbytes())
        known = self._sent_storages.get(key)
        if known is not None and known.place != place:
            self._forget(key)
            known = None
        if known is None:
            for gone in [key for key, sent in self._sent_storages.items() if sent.weak.expired()]:  # type: ignore[no-untyped-call]
                self._forget(gone)
            self._sent_storages[key] = _SentStorage(StorageWeakRef(storage), place)  # type: ignore[no-untyped-call]
            return None
        if known.not_exportable:
            return None
        try:
            exported = known.exported or ExportedMemory(
                self._streams.alias_storage(data), next(self._memory_ids)
            )
            for peer in peers:
                exported.token(peer, self._streams)
        except RuntimeError as error:  # memory of another allocator, or of another process
            logger.info("a tensor's memory cannot be shown to peers, and is copied: %s", error)
            self._sent_storages[key] = known._replace(not_exportable=True, exported=None)
            return None
        self._sent_storages[key] = known._replace(exported=exported)
        return exported

    def close(self) -> None:
        """Free the buffers and exported storages."""
        self.buffers.clear()
        self._sent_storages.clear()

    def _forget(self, key: int) -> None:
        """Drop a storage that no longer exists, and schedule notice to peers."""
        known = self._sent_storages.pop(key)
        if known.exported is not None:
            self._retire(known.exported)

    def _wait_for_reads(self, buffer: ExportedMemory) -> None:
        for event_pair in buffer.reads:
            event_pair.free(self._streams)
        buffer.reads.clear()

    def _retire(self, exported: ExportedMemory) -> None:
        for peer in exported.tokens:
            self.retired[peer].append(exported.memory_id)
