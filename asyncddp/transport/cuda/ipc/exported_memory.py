"""GPU memory that peers can map by CUDA IPC: pooled buffers, and user tensors sent repeatedly.

What CUDA does is undefined where memory is freed by ``cudaFree`` while a peer has it mapped.
Buffers are therefore kept until all importers have closed them. A user's tensor cannot be kept:
exporting its own storage would end its ``record_stream``, and an alias does not hold memory. Once
it is freed, its importers are told to close it when any request is driven; until then torch's
allocator keeps its segment, unless ``torch.cuda.empty_cache()``, which has no hook and begins each
capture of a graph, or a failed allocation frees it. The mappings that are left then are not read,
as those that UCX keeps, and CUDA gives new memory at that address another handle. Memory of
expandable segments lives as long as its last mapping.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncddp.device.streams import DeviceEvent, DeviceStreams, InterprocessEvent, StreamRole
from asyncddp.tensors.free_list import FreeList
from asyncddp.transport.cuda.ipc.ipc_messages import ALL_MEMORY, MAX_TOKEN_BYTES

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
    tokens: dict[int, bytes] = field(default_factory=dict)  # for each peer that may map it
    reads: list[EventPair] = field(default_factory=list)  # acknowledged, but not waited for yet
    pending_acks: int = 0  # done messages to come

    def token(self, peer: int, streams: DeviceStreams) -> bytes:
        """Return the export token of the memory for one peer; a RuntimeError if there is none."""
        if peer not in self.tokens:
            token = streams.export_memory(self.memory)
            if len(token) > MAX_TOKEN_BYTES:
                raise RuntimeError(
                    f"expected a handle of at most {MAX_TOKEN_BYTES} bytes, got {len(token)}"
                )
            self.tokens[peer] = token
        return self.tokens[peer]


class _SentStorage(NamedTuple):
    """Record of a user's tensor storage that was sent: where it lies, and how it was exported."""

    weak: StorageWeakRef
    place: tuple[int, int]  # its address and size
    exported: ExportedMemory | None = None
    not_exportable: bool = False


class ExportedMemoryPool:
    """Pool of the GPU memory that one rank lets its peers map and read by CUDA IPC.

    ``request_close`` tells a peer to close the memory of an id.
    """

    def __init__(self, streams: DeviceStreams, request_close: Callable[[int, int], None]) -> None:
        self._streams, self._request_close = streams, request_close
        self._memory_ids = itertools.count()
        self.buffers = FreeList(self._allocate, oldest_first=True)  # peers have time to read
        self._sent_storages: dict[int, _SentStorage] = {}
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
            self.retire_freed(len(self._sent_storages))
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

    def retire_freed(self, most: int = 1) -> None:
        """Retire exported storages that no longer exist, of ``most`` that were checked last."""
        for key in list(itertools.islice(self._sent_storages, most)):
            if self._sent_storages[key].weak.expired():  # type: ignore[no-untyped-call]
                self._forget(key)
            else:
                self._sent_storages[key] = self._sent_storages.pop(key)

    def confirm_closed(self, peer: int, memory_id: int) -> None:
        """Note that a peer has closed memory, or all of it."""
        if memory_id == ALL_MEMORY:
            self.left.add(peer)
        for number, exported in list(self.retired.items()):
            if memory_id in (number, ALL_MEMORY):
                exported.tokens.pop(peer, None)
                if not exported.tokens:
                    del self.retired[number]

    def close(self) -> None:
        """Free the buffers and exported storages."""
        self.buffers.clear()
        self._sent_storages.clear()
        self.retired.clear()

    def _forget(self, key: int) -> None:
        """Drop a storage that no longer exists."""
        known = self._sent_storages.pop(key)
        if known.exported is not None:
            self._retire(known.exported)

    def _wait_for_reads(self, buffer: ExportedMemory) -> None:
        for event_pair in buffer.reads:
            event_pair.free(self._streams)
        buffer.reads.clear()

    def _retire(self, exported: ExportedMemory) -> None:
        """Have the importers close memory that is not used again, and keep it until they have."""
        peers = exported.tokens.keys() - self.left
        exported.tokens = {peer: exported.tokens[peer] for peer in peers}
        if peers:
            self.retired[exported.memory_id] = exported
        for peer in peers:
            self._request_close(peer, exported.memory_id)
