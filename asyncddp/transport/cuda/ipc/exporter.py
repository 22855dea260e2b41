"""Export of GPU memory by CUDA IPC: announces it to peers and awaits their read confirmations."""

from __future__ import annotations

from collections import defaultdict

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.ipc.exported_memory import (
    EventPair,
    ExportedMemory,
    ExportedMemoryPool,
)
from asyncddp.transport.cuda.ipc.ipc_messages import (
    DONE_BYTES,
    MAX_RETIRED_IDS,
    DoneMessage,
    ReadyMessage,
    allocate_message_buffer,
    decode_message,
    encode_message,
)


class PendingPeerRead:
    """Pending read of this rank's GPU memory by a peer; done once the peer has queued its read.

    Args:
        peer: The peer.
        event_pair: The events of this use of the memory.
        send_request: The send of the ready message.
        done_request: The receive of the done message.
        message_buffer: Buffer of the done message.
        buffer: The exported buffer; None where the user's tensor is exported itself.
    """

    def __init__(
        self,
        peer: int,
        event_pair: EventPair,
        send_request: Request,
        done_request: Request,
        message_buffer: torch.Tensor,
        buffer: ExportedMemory | None,
    ) -> None:
        self.peer, self.event_pair, self.message_buffer, self.buffer = (
            peer,
            event_pair,
            message_buffer,
            buffer,
        )
        self._sender, self._done_request = send_request, done_request
        self.over = False
        self.problem: PeerError | None = None

    def poll(self) -> bool:
        """Return whether the done message has come, or never will."""
        try:
            self.over = all([self._sender.done(), self._done_request.done()])
        except PeerError as problem:
            self.problem, self.over = problem, True
        return self.over

    def done(self) -> bool:
        """Return whether the done message was handled."""
        if self.problem is not None:
            raise self.problem
        return self.over


class MemoryExporter:
    """Exporter of this rank's GPU memory: announces it to peers, awaits their read confirmations.

    Args:
        streams: Streams of the device.
        memory: The pool of exported memory.
        ready_transport: A host transport for ready messages.
        done_transport: Another one for done messages.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        memory: ExportedMemoryPool,
        ready_transport: Transport,
        done_transport: Transport,
    ) -> None:
        self._streams, self._memory = streams, memory
        self._ready_transport, self._done_transport = ready_transport, done_transport
        self._event_pairs: dict[int, list[EventPair]] = defaultdict(list)
        self._made: list[EventPair] = []
        self._pending_reads: list[PendingPeerRead] = []

    @property
    def busy(self) -> bool:
        """True if peers have yet to enqueue or to finish reads."""
        read = all(
            event_pair.read_event is None or event_pair.read_event.done()
            for event_pair in self._made
        )
        return bool(self._pending_reads) or not read

    def announce(
        self,
        peer: int,
        tag: int,
        exported: ExportedMemory | None,
        offset: int,
        size: int,
        *,
        last: bool = True,
        buffer: bool = True,
    ) -> PendingPeerRead:
        """Announce bytes to a peer, which it can read after earlier work of the compute stream.

        Args:
            peer: The peer.
            tag: Tag of the tensor.
            exported: The memory; None for no bytes.
            offset: Offset of the bytes in it.
            size: Number of bytes.
            last: Whether these are the last bytes of the tensor.
            buffer: Whether the memory is a buffer, reused once the peer has read it.
        """
        event_pair = self._take_event_pair(peer)
        event_pair.ready.record(StreamRole.COMPUTE)
        token = b"" if exported is None else exported.token(peer, self._streams)
        words = self._memory.retired[peer]
        retired = tuple(words[:MAX_RETIRED_IDS])
        del words[:MAX_RETIRED_IDS]
        memory_id = -1 if exported is None else exported.memory_id
        message = ReadyMessage(
            event_pair.number,
            event_pair.ready.handle,
            memory_id,
            token,
            offset,
            size,
            last,
            retired,
        )
        message_buffer = allocate_message_buffer(DONE_BYTES)
        done_request = self._done_transport.irecv(message_buffer, peer, tag)
        send_request = self._ready_transport.isend(encode_message(message), peer, tag)
        pending_read = PendingPeerRead(
            peer,
            event_pair,
            send_request,
            done_request,
            message_buffer,
            exported if buffer else None,
        )
        self._pending_reads.append(pending_read)
        return pending_read

    def drive(self) -> None:
        """Handle the done messages that have come."""
        ended = [pending_read for pending_read in self._pending_reads if pending_read.poll()]
        if not ended:
            return
        self._pending_reads = [
            pending_read for pending_read in self._pending_reads if not pending_read.over
        ]
        for pending_read in ended:
            if pending_read.problem is None:
                try:
                    self._take(pending_read)
                except (RuntimeError, OSError) as error:
                    pending_read.problem = PeerError(
                        f"the event after which rank {pending_read.peer} has read cannot be "
                        f"opened: {error}. Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
                    )

    def _take(self, pending_read: PendingPeerRead) -> None:
        event_pair, done_request = (
            pending_read.event_pair,
            decode_message(pending_read.message_buffer, DoneMessage, pending_read.peer),
        )
        if event_pair.read_event is None or event_pair.handle != done_request.read_event:
            event_pair.read_event, event_pair.handle = (
                self._streams.import_event(done_request.read_event),
                done_request.read_event,
            )
        if pending_read.buffer is None:
            event_pair.free(self._streams)
        else:
            self._memory.acknowledge(pending_read.buffer, event_pair)

    def _take_event_pair(self, peer: int) -> EventPair:
        free = self._event_pairs[peer]
        if free:
            return free.pop()
        event_pair = EventPair(len(self._made), self._streams.create_interprocess_event(), free)
        self._made.append(event_pair)
        return event_pair
