"""Importer of the CUDA IPC transport: maps peers' GPU memory, to copy or read tensors there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Generator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncddp.device.stream_interfaces import DeviceEvent, InterprocessEvent, StreamRole, empty_on
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.cuda.ipc.ipc_messages import (
    ALL_MEMORY,
    NO_MEMORY,
    CloseMemoryMessage,
    DoneMessage,
    MemoryClosedMessage,
    ReadyMessage,
)
from asyncddp.transport.cuda.ipc.ipc_tasks import (
    ImportTask,
    IPCResources,
    MessageCondition,
    ReceiveTask,
    TaskSteps,
)


@dataclass(eq=False)
class _ImportedMemory:
    """GPU memory of a peer, mapped into this process until its owner retires it."""

    memory: torch.Tensor
    storage: StorageWeakRef
    users: int = 0  # ready messages about it without a done message yet
    read: DeviceEvent | None = None  # after which nothing reads it

    def reads_ended(self) -> bool:
        """Return whether the device has completed all recorded reads."""
        return self.read is None or self.read.done()

    def close(self) -> bool:
        """Close the memory unless it is being read; return whether it is closed."""
        if not self.users and self.reads_ended():
            self.memory = empty((0,), torch.uint8)
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class MemoryImporter:
    """Importer of peers' GPU tensors by CUDA IPC: copies them, or maps them for reading in place.

    It receives ready messages, and notifies peers once all reads of their memory are enqueued.
    ``imported`` holds the mapped memory, keyed by peer and memory id.
    """

    def __init__(self, shared: IPCResources) -> None:
        self._shared, self._streams = shared, shared.streams
        self._tasks, self._drive_all = shared.tasks, shared.drive
        self.imported: dict[tuple[int, int], _ImportedMemory] = {}
        self._retired: list[tuple[int, int]] = []  # by their owners, and not closed yet
        self._unread: dict[tuple[int, int], deque[ReadyMessage]] = defaultdict(deque)  # by tag
        self._ready_events: dict[tuple[int, int], DeviceEvent] = {}  # by peer and event pair
        self._read_events: dict[tuple[int, int], InterprocessEvent] = {}

    def take(self, peer: int, message: ReadyMessage) -> torch.Tensor:
        """Map the bytes that a ready message announces; the compute stream waits for them."""
        try:
            source = self._bytes(peer, message)
            self._streams.wait_event(StreamRole.COMPUTE, self._ready_event(peer, message))
        except (RuntimeError, OSError) as error:
            raise PeerError(
                f"the memory that rank {peer} shows on its device cannot be opened: {error}. "
                "Leave cuda_ipc out of ASYNCDDP_DEVICE_TRANSPORTS"
            ) from error
        return source

    def acknowledge(self, task: ReceiveTask, message: ReadyMessage) -> None:
        """Notify the peer that all reads of the bytes are enqueued on the compute stream."""
        key, handle = (task.peer, message.event_pair), b""
        read_event = self._read_events.get(key)
        if read_event is None:
            read_event = self._read_events[key] = self._streams.create_interprocess_event()
            handle = read_event.handle
        read_event.record(StreamRole.COMPUTE)
        imported = self.imported.get((task.peer, message.memory_id))
        if imported is not None:
            imported.users, imported.read = imported.users - 1, read_event
        self._shared.post(task.peer, DoneMessage(message.event_pair, handle))

    def receive(self, peer: int, message: ReadyMessage | CloseMemoryMessage) -> None:
        """Handle a peer's message: keep a ready message for its task, or record memory to close."""
        if isinstance(message, ReadyMessage):
            self._unread[peer, message.tag].append(message)
        else:
            self._retired.append((peer, message.memory_id))

    def close_retired(self) -> None:
        """Close retired memory that is not being read, and notify its owners."""
        if self._retired:
            self._close(self._retired)
            closed = [key for key in self._retired if key not in self.imported]
            self._retired = [key for key in self._retired if key in self.imported]
            for peer, memory_id in closed:
                self._shared.post(peer, MemoryClosedMessage(memory_id))

    def close(self, peers: Collection[int]) -> None:
        """Close all memory that is not being read; notify peers without open memory."""
        self._close(list(self.imported))
        for peer in set(peers) - {peer for peer, _ in self.imported}:
            self._shared.post(peer, MemoryClosedMessage(ALL_MEMORY))

    def _close(self, keys: Collection[tuple[int, int]]) -> None:
        """Close and remove the memory of given keys, unless it is being read."""
        with self._streams.stream_context(StreamRole.HOST_TO_DEVICE):  # which is idle
            for key in keys:
                if key in self.imported and self.imported[key].close():
                    del self.imported[key]

    @property
    def busy(self) -> bool:
        """True if reads are pending."""
        return not all(one.reads_ended() for one in self.imported.values())

    def _bytes(self, peer: int, message: ReadyMessage) -> torch.Tensor:
        if message.memory_id == NO_MEMORY:
            return empty_on(self._streams, (0,), torch.uint8)
        key = peer, message.memory_id
        if key not in self.imported:
            if not message.token:
                raise RuntimeError("its device's libraries cannot export it")
            memory = self._streams.import_memory(message.token)
            storage = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
            self.imported[key] = _ImportedMemory(memory, storage)
        self.imported[key].users += 1
        return self.imported[key].memory[: message.size]

    def _ready_event(self, peer: int, message: ReadyMessage) -> DeviceEvent:
        key = peer, message.event_pair
        if key not in self._ready_events:
            self._ready_events[key] = self._streams.import_event(message.ready)
        return self._ready_events[key]

    def copy(self, out: torch.Tensor, peer: int, tag: int) -> ReceiveTask:
        """Start to copy a peer's exported tensor into ``out``; done once it has been copied."""
        task = ReceiveTask(peer, tag, self._drive_all)
        self._streams.record_stream(out, StreamRole.COMPUTE)
        task.steps = self._copy_steps(task, as_bytes(out))
        self._tasks.append(task)
        self._drive_all()
        return task

    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> ImportTask:
        """Start to map a peer's exported tensor; a tensor in pieces is copied instead."""
        task = ImportTask(peer, tag, self._drive_all)
        task.steps = self._import_steps(task, shape, dtype)
        self._tasks.append(task)
        self._drive_all()
        return task

    def _copy_steps(self, task: ReceiveTask, out: torch.Tensor) -> TaskSteps:
        message = yield from self._receive_message(task)
        yield from self._receive_pieces(task, out, message)
        yield None
        yield self._streams.record_event(StreamRole.COMPUTE)

    def _import_steps(
        self, task: ImportTask, shape: tuple[int, ...], dtype: torch.dtype
    ) -> TaskSteps:
        message = yield from self._receive_message(task)
        if message.last:
            tensor = self.take(task.peer, message).view(dtype).view(shape)
            task.set_tensor(tensor, lambda: self.acknowledge(task, message))
            return
        whole = empty_on(self._streams, shape, dtype)
        yield from self._receive_pieces(task, as_bytes(whole), message)
        task.set_tensor(whole)

    def _receive_pieces(
        self, task: ReceiveTask, out: torch.Tensor, message: ReadyMessage
    ) -> TaskSteps:
        """Copy a tensor piece by piece, acknowledging each once its copy is enqueued."""
        start = 0
        while True:
            source = self.take(task.peer, message)
            if task.needed and message.size:
                self._streams.copy(out[start : start + message.size], source, StreamRole.COMPUTE)
            del source
            self.acknowledge(task, message)
            start += message.size
            if message.last:
                return
            message = yield from self._receive_message(task)

    def _receive_message(
        self, task: ReceiveTask
    ) -> Generator[DeviceEvent | None, None, ReadyMessage]:
        key, transport = (task.peer, task.tag), self._shared.message_transport
        yield MessageCondition(task.peer, transport, lambda: key in self._unread)
        task.announced = True
        message = self._unread[key].popleft()
        if not self._unread[key]:
            del self._unread[key]
        return message
