"""Exporter of the CUDA IPC transport: copies GPU tensors into memory that peers map and read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.cuda.ipc.exported_memory import (
    EventPair,
    ExportedMemory,
    ExportedMemoryPool,
)
from asyncddp.transport.cuda.ipc.ipc_messages import (
    NO_MEMORY,
    CloseMemoryMessage,
    DoneMessage,
    MemoryClosedMessage,
    ReadyMessage,
)
from asyncddp.transport.cuda.ipc.ipc_tasks import (
    IPCResources,
    MessageCondition,
    SendTask,
    TaskSteps,
)

MAX_COPY_BYTES = 1 << 28
"""Maximum size of a tensor that is copied as a whole, in bytes; larger ones go in pieces."""
_PIECE = 1 << 26  # bytes of the pieces of a larger one
_DEPTH = 2  # most unread pieces


class MemoryExporter:
    """Exporter of GPU tensors by CUDA IPC: copies them to buffers that peers read in place.

    It announces memory to a peer by a ready message, and waits for the peer's done message. Further
    messages ask peers to close memory, and confirm that they have closed it.
    """

    def __init__(self, shared: IPCResources) -> None:
        self._shared, self._streams = shared, shared.streams
        self._tasks, self._drive_all = shared.tasks, shared.drive
        self.memory = ExportedMemoryPool(
            shared.streams, lambda peer, number: shared.post(peer, CloseMemoryMessage(number))
        )
        self._event_pairs: dict[int, list[EventPair]] = defaultdict(list)
        self._made: list[EventPair] = []

    @property
    def busy(self) -> bool:
        """True if peers that have not left must still enqueue reads, or reads have not ended."""
        events = (event_pair.read_event for event_pair in self._made)
        unread = any(
            isinstance(task, SendTask) and task.peer not in self.memory.left for task in self._tasks
        )
        return unread or not all(event is None or event.done() for event in events)

    def _announce(
        self, task: SendTask, buffer: ExportedMemory | None, size: int, *, last: bool = True
    ) -> TaskSteps:
        """Announce a buffer to a peer, to be read after earlier work of the compute stream.

        Yields None once it is announced, and ends once the peer has enqueued its read. An empty
        tensor has no buffer. A buffer is reused once all its peers have read it.
        """
        peer, event_pair = task.peer, self._take_event_pair(task.peer)
        event_pair.ready.record(StreamRole.COMPUTE)
        token, problem = b"", None
        try:
            token = b"" if buffer is None else buffer.token(peer, self._streams)
        except (RuntimeError, OSError) as error:
            problem = PeerError(
                f"GPU memory cannot be exported to rank {peer}: {error}. "
                "Leave cuda_ipc out of ASYNCDDP_DEVICE_TRANSPORTS"
            )
        message = ReadyMessage(
            task.tag,
            event_pair.number,
            NO_MEMORY if buffer is None else buffer.memory_id,
            size,
            last,
            event_pair.ready.handle if event_pair.read_event is None else b"",
            token,
        )
        self._shared.post(peer, message)
        yield None
        if problem is not None:
            raise problem
        transport = self._shared.message_transport
        yield MessageCondition(peer, transport, lambda: event_pair.answered)
        if task.waits_for_copy:
            yield event_pair.ready
        self._free_read(peer, event_pair, buffer)

    def _free_read(self, peer: int, event_pair: EventPair, buffer: ExportedMemory | None) -> None:
        """Free event pair and buffer after the peer has enqueued its read."""
        if event_pair.read_event is None:
            try:
                event_pair.read_event = self._streams.import_event(event_pair.handle)
            except (RuntimeError, OSError) as error:
                raise PeerError(
                    f"the event after which rank {peer} has read cannot be opened: {error}. "
                    "Leave cuda_ipc out of ASYNCDDP_DEVICE_TRANSPORTS"
                ) from error
        if buffer is None:
            event_pair.free(self._streams)
        else:
            self.memory.acknowledge(buffer, event_pair)

    def receive(self, peer: int, message: DoneMessage | MemoryClosedMessage) -> None:
        """Handle a peer's message: it has enqueued its reads, or has closed memory."""
        if isinstance(message, MemoryClosedMessage):
            self.memory.confirm_closed(peer, message.memory_id)
            return
        event_pair = self._made[message.event_pair]
        event_pair.answered, event_pair.handle = True, message.read or event_pair.handle

    def _take_event_pair(self, peer: int) -> EventPair:
        free = self._event_pairs[peer]
        if free:
            return free.pop()
        event_pair = EventPair(len(self._made), self._streams.create_interprocess_event(), free)
        self._made.append(event_pair)
        return event_pair

    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float, *, wait: bool = False
    ) -> dict[int, SendTask]:
        """Export a copy of a tensor, times a factor, to peers; return a task per peer.

        With ``wait``, a task is done only after the device has made the copy.
        """
        in_pieces = data.nbytes > MAX_COPY_BYTES
        if in_pieces and factor != 1.0:
            with self._streams.stream_context(StreamRole.COMPUTE):
                data = data * factor
        self._streams.record_stream(data, StreamRole.COMPUTE)
        tasks: dict[int, SendTask] = {}
        whole = data.nbytes and not in_pieces
        buffer = self._make_copy(data, factor, len(tags)) if whole else None
        for peer, tag in tags.items():
            task = tasks[peer] = SendTask(peer, tag, self._drive_all)
            task.waits_for_copy = wait
            if in_pieces:
                task.steps = self._export_in_pieces(task, as_bytes(data))
            else:
                task.copied = True
                task.steps = self._announce(task, buffer, data.nbytes)
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

    def _export_in_pieces(self, task: SendTask, flat: torch.Tensor) -> TaskSteps:
        """Export a large tensor in pieces, using a few buffers in turn."""
        reads: deque[TaskSteps] = deque()
        for first in range(0, flat.numel(), _PIECE):
            if len(reads) == _DEPTH:
                yield from reads.popleft()
            piece = flat[first : first + _PIECE]
            buffer = self._make_copy(piece, 1.0, 1)
            last = first + _PIECE >= flat.numel()
            reads.append(self._announce(task, buffer, piece.numel(), last=last))
            next(reads[-1])
        task.copied = True
        yield None
        for read in reads:
            yield from read
