"""Export of GPU memory by CUDA IPC: lets peers map and read copies of tensors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import ExportRequest
from asyncddp.transport.cuda.ipc.exported_memory import (
    EventPair,
    ExportedMemory,
    ExportedMemoryPool,
)
from asyncddp.transport.cuda.ipc.ipc_messages import DoneMessage, ReadyMessage
from asyncddp.transport.cuda.ipc.tasks import SendTask, TaskSteps
from asyncddp.transport.cuda.request_queue import RequestQueue

MAX_COPY_BYTES = 1 << 28
"""Most bytes of a tensor that is copied as a whole; larger ones are copied in pieces."""
_PIECE = 1 << 26  # bytes of the pieces of a larger one
_DEPTH = 2  # most unread pieces


@dataclass(eq=False)
class PendingReadByPeer:
    """Pending read of this rank's GPU memory by a peer; done once the peer has queued its read."""

    peer: int
    event_pair: EventPair
    send_request: Request  # of the ready message
    done_request: Request  # of the done message, if one will come into the message buffer
    message_buffer: torch.Tensor
    buffer: ExportedMemory | None  # None for a tensor without bytes
    problem: PeerError | None = None
    over: bool = False

    def poll(self) -> bool:
        """Return whether the done message has come, or never will."""
        try:
            self.over = all([self.send_request.done(), self.done_request.done()])
        except PeerError as problem:
            self.problem, self.over = problem, True
        return self.over

    def done(self) -> bool:
        """Return whether the done message was handled."""
        if self.problem is not None:
            raise self.problem
        return self.over


class MemoryExporter:
    """Exports copies of GPU tensors by CUDA IPC, which peers read in this rank's memory.

    It announces memory to a peer by a ready message and waits for the peer's done message. Both
    kinds go by a host transport each; control messages beside them name memory to close, and
    memory that the peer has closed.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        ready_transport: Transport,
        done_transport: Transport,
        tasks: RequestQueue,
        drive: Callable[[], None],
    ) -> None:
        self._streams = streams
        self._ready_transport, self._done_transport = ready_transport, done_transport
        self.memory = ExportedMemoryPool(
            streams, lambda peer, memory_id: ready_transport.post(peer, pack(memory_id))
        )
        self._tasks, self._drive_all = tasks, drive
        self._event_pairs: dict[int, list[EventPair]] = defaultdict(list)
        self._made: list[EventPair] = []
        self._pending_reads: list[PendingReadByPeer] = []

    @property
    def busy(self) -> bool:
        """True if peers have yet to enqueue or to finish reads."""
        events = (event_pair.read_event for event_pair in self._made)
        read = all(event is None or event.done() for event in events)
        return bool(self._pending_reads) or not read

    def announce(
        self, peer: int, tag: int, buffer: ExportedMemory | None, size: int, *, last: bool = True
    ) -> PendingReadByPeer:
        """Announce bytes to a peer, which it can read after earlier work of the compute stream.

        A tensor without bytes has no buffer; one is reused once all its peers have read it.
        """
        event_pair = self._take_event_pair(peer)
        event_pair.ready.record(StreamRole.COMPUTE)
        token, problem = b"", None
        try:
            token = b"" if buffer is None else buffer.token(peer, self._streams)
        except (RuntimeError, OSError) as error:
            problem = PeerError(
                f"GPU memory cannot be exported to rank {peer}: {error}. "
                "Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
            )
        message = ReadyMessage(
            event_pair=event_pair.number,
            ready=event_pair.ready.handle,
            memory_id=-1 if buffer is None else buffer.memory_id,
            token=token,
            size=size,
            last=last,
        )
        answer = DoneMessage.allocate_buffer()
        sent = self._ready_transport.isend(message.encode(), peer, tag)
        done = self._done_transport.irecv(answer, peer, tag) if problem is None else sent
        pending_read = PendingReadByPeer(peer, event_pair, sent, done, answer, buffer, problem)
        self._pending_reads.append(pending_read)
        return pending_read

    def drive(self) -> None:
        """Handle the messages that have come."""
        for peer, message in self._done_transport.poll():
            closed = unpack(message, int, f"what rank {peer} says of memory that it had open")
            self.memory.confirm_closed(peer, closed)
        ended = [pending_read for pending_read in self._pending_reads if pending_read.poll()]
        if not ended:
            return
        self._pending_reads = [one for one in self._pending_reads if not one.over]
        for pending_read in ended:
            if pending_read.problem is None:
                try:
                    self._take(pending_read)
                except (RuntimeError, OSError) as error:
                    pending_read.problem = PeerError(
                        f"the event after which rank {pending_read.peer} has read cannot be "
                        f"opened: {error}. Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
                    )

    def _take(self, pending_read: PendingReadByPeer) -> None:
        event_pair = pending_read.event_pair
        message = DoneMessage.decode(pending_read.message_buffer, pending_read.peer)
        if event_pair.read_event is None or event_pair.handle != message.read_event:
            event_pair.read_event = self._streams.import_event(message.read_event)
            event_pair.handle = message.read_event
        if pending_read.buffer is None:
            event_pair.free(self._streams)
        else:
            self.memory.acknowledge(pending_read.buffer, event_pair)

    def _take_event_pair(self, peer: int) -> EventPair:
        free = self._event_pairs[peer]
        if free:
            return free.pop()
        event_pair = EventPair(len(self._made), self._streams.create_interprocess_event(), free)
        self._made.append(event_pair)
        return event_pair

    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float
    ) -> dict[int, SendTask]:
        """Export a copy of a tensor, or a multiple of one of at most ``MAX_COPY_BYTES``."""
        self._streams.record_stream(data, StreamRole.COMPUTE)
        tasks: dict[int, SendTask] = {}
        whole = 0 < data.nbytes <= MAX_COPY_BYTES
        buffer = self._make_copy(data, factor, len(tags)) if whole else None
        for peer, tag in tags.items():
            task = tasks[peer] = SendTask(("to", peer, tag), self._drive_all)
            if data.nbytes > MAX_COPY_BYTES:
                task.steps = self._export_in_pieces(task, as_bytes(data), peer, tag)
            else:
                task.copied = True
                task.steps = self._export_whole(buffer, data.nbytes, peer, tag)
            self._tasks.append(task)
        self._drive_all()
        return tasks

    def _make_copy(self, data: torch.Tensor, factor: float, pending_acks: int) -> ExportedMemory:
        buffer = self.memory.take(data.nbytes, pending_acks)
        room = buffer.memory[: data.nbytes]
        if factor == 1.0:
            self._streams.copy(room, as_bytes(data), StreamRole.COMPUTE)
        else:
            with self._streams.stream_context(StreamRole.COMPUTE):
                torch.mul(data, factor, out=room.view(data.dtype).view(data.shape))
        return buffer

    def _export_whole(
        self, buffer: ExportedMemory | None, size: int, peer: int, tag: int
    ) -> TaskSteps:
        pending_read = self.announce(peer, tag, buffer, size)
        yield None
        yield pending_read

    def _export_in_pieces(
        self, task: SendTask, flat: torch.Tensor, peer: int, tag: int
    ) -> TaskSteps:
        """Export copies of pieces, with a few buffers in turn."""
        pending_reads: deque[PendingReadByPeer] = deque()
        for first in range(0, flat.numel(), _PIECE):
            if len(pending_reads) == _DEPTH:
                yield pending_reads.popleft()
            piece = flat[first : first + _PIECE]
            buffer = self._make_copy(piece, 1.0, 1)
            last = first + _PIECE >= flat.numel()
            pending_reads.append(self.announce(peer, tag, buffer, piece.numel(), last=last))
        task.copied = True
        yield None
        yield from pending_reads


class CopiedSendRequest:
    """Send request that is done once the tensor was copied and the peer has enqueued its read."""

    def __init__(self, export: ExportRequest, streams: DeviceStreams) -> None:
        self._export, self._streams = export, streams
        self.moves = 0
        self._made: DeviceEvent | None = None

    def done(self) -> bool:
        """Return whether the copy was made and the peer has enqueued its read."""
        if self._made is None and self._export.reusable():
            self._made = self._streams.record_event(StreamRole.COMPUTE)
        ended = self._export.done()
        self.moves = getattr(self._export, "moves", 0)
        return ended and self._made is not None and self._made.done()

    def abandon(self) -> None:
        """Abandon the export request."""
        self._export.abandon()


class StagedExportRequest:
    """Export request to a rank out of reach: the tensor is sent through host memory instead."""

    def __init__(self, transfer: Request) -> None:
        self._transfer = transfer
        self.done, self.abandon = transfer.done, transfer.abandon

    def reusable(self) -> bool:
        """Return whether the tensor was sent."""
        return self._transfer.done()
