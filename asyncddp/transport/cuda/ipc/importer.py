"""Import of peers' GPU memory by CUDA IPC: maps it, and tells the peers once reads are queued."""

from __future__ import annotations

from collections import OrderedDict

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, InterprocessEvent, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.transport.base import Request, Transport, has_ended
from asyncddp.transport.cuda.ipc.ipc_messages import DoneMessage, ReadyMessage, encode_message

_MAX_OPEN = 512  # pieces of memory that are kept open


class _ImportedMemory:
    """GPU memory of a peer that is mapped into this process.

    Attributes:
        memory: Its bytes.
        users: Number of ready messages about it without a done message yet.
        read: Event after which nothing reads it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.users = 0
        self.read: DeviceEvent | None = None


class MemoryImporter:
    """Importer that maps peers' GPU memory, and tells the peers once all reads of it are queued.

    Args:
        streams: Streams of the device.
        done_transport: A host transport for done messages.
    """

    def __init__(self, streams: DeviceStreams, done_transport: Transport) -> None:
        self._streams, self._done_transport = streams, done_transport
        self._imported: OrderedDict[tuple[int, int], _ImportedMemory] = OrderedDict()
        self._closing: list[_ImportedMemory] = []
        self._ready: dict[tuple[int, int], tuple[bytes, DeviceEvent]] = {}
        self._read_events: dict[tuple[int, int], InterprocessEvent] = {}
        self._outgoing: list[Request] = []

    def __len__(self) -> int:
        """Return the number of imported pieces of memory."""
        return len(self._imported) + len(self._closing)

    def take(self, peer: int, message: ReadyMessage) -> torch.Tensor:
        """Import the bytes of a ready message; the compute stream waits until they are ready.

        Raises:
            PeerError: The memory cannot be opened from this process.
        """
        try:
            source = self._bytes(peer, message)
            self._streams.wait_event(StreamRole.COMPUTE, self._ready_event(peer, message))
        except (RuntimeError, OSError) as error:
            raise PeerError(
                f"the memory that rank {peer} shows on its device cannot be opened: {error}. "
                "Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
            ) from error
        for memory_id in message.retired:
            self._close((peer, memory_id))
        return source

    def acknowledge(self, peer: int, tag: int, message: ReadyMessage) -> None:
        """Tell the peer that the work that reads the bytes is enqueued on the compute stream."""
        key = peer, message.event_pair
        read_event = self._read_events.get(key)
        if read_event is None:
            read_event = self._read_events[key] = self._streams.create_interprocess_event()
        read_event.record(StreamRole.COMPUTE)
        imported = self._imported.get((peer, message.memory_id))
        if imported is not None:
            imported.users, imported.read = imported.users - 1, read_event
        encoded = encode_message(DoneMessage(message.event_pair, read_event.handle))
        self._outgoing.append(self._done_transport.isend(encoded, peer, tag))

    def drive(self) -> None:
        """Advance done messages, and close memory that nothing reads any more."""
        if self._outgoing:
            self._outgoing = [transfer for transfer in self._outgoing if not has_ended(transfer)]
        if self._closing:
            with self._streams.stream_context(StreamRole.HOST_TO_DEVICE):  # which is idle
                self._closing = [one for one in self._closing if not _reads_ended(one)]

    def close(self) -> None:
        """Close all memory that nothing reads any more."""
        for key in list(self._imported):
            self._close(key)
        self.drive()

    @property
    def busy(self) -> bool:
        """True if done messages or reads are pending."""
        return bool(self._outgoing) or not all(_reads_ended(one) for one in self._imported.values())

    def _bytes(self, peer: int, message: ReadyMessage) -> torch.Tensor:
        if message.memory_id < 0:
            return empty((0,), torch.uint8, self._streams.device)
        key = peer, message.memory_id
        imported = self._imported.get(key)
        if imported is None:
            imported = self._imported[key] = _ImportedMemory(
                self._streams.import_memory(message.token)
            )
            self._make_room()
        self._imported.move_to_end(key)
        imported.users += 1
        return imported.memory[message.offset : message.offset + message.size]

    def _ready_event(self, peer: int, message: ReadyMessage) -> DeviceEvent:
        key = peer, message.event_pair
        handle, event = self._ready.get(key, (b"", None))
        if event is None or handle != message.ready:
            event = self._streams.import_event(message.ready)
            self._ready[key] = message.ready, event
        return event

    def _make_room(self) -> None:
        """Close the least recently used memory, where too much is open."""
        for key in list(self._imported)[: max(0, len(self._imported) - _MAX_OPEN)]:
            if not self._imported[key].users and self._imported[key].read is not None:
                self._close(key)

    def _close(self, key: tuple[int, int]) -> None:
        imported = self._imported.pop(key, None)
        if imported is not None:
            self._closing.append(imported)


def _reads_ended(imported: _ImportedMemory) -> bool:
    return imported.read is None or imported.read.done()
