"""Receiving side of CUDA IPC: copies peers' tensors, or lets the caller read them in place."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole, empty_on
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.ipc.exporter import PendingPeerRead
from asyncddp.transport.cuda.ipc.importer import MemoryImporter
from asyncddp.transport.cuda.ipc.ipc_messages import (
    READY_BYTES,
    ReadyMessage,
    allocate_message_buffer,
    decode_message,
)
from asyncddp.transport.cuda.ipc.tasks import ImportTask, ReceiveTask, TaskScheduler, TaskSteps

_ReceiveTaskT = TypeVar("_ReceiveTaskT", ReceiveTask, ImportTask)


class IPCTensorReceiver:
    """Receiver of peers' GPU tensors, which it copies or lets the caller read in place.

    Args:
        streams: Streams of the device.
        importer: Opens the exported memory, and sends done messages.
        ready_transport: A host transport for ready messages.
        scheduler: Runs the tasks.
        drive: Advances all tasks.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        importer: MemoryImporter,
        ready_transport: Transport,
        scheduler: TaskScheduler,
        drive: Callable[[], None],
    ) -> None:
        self._streams, self._importer, self._ready_transport = streams, importer, ready_transport
        self._scheduler, self._drive = scheduler, drive

    def copy(self, out: torch.Tensor, peer: int, tag: int) -> ReceiveTask:
        """Start to copy the tensor that a peer exports; done once it has been copied."""
        task = ReceiveTask(("from", peer, tag), self._drive)
        self._streams.record_stream(out, StreamRole.COMPUTE)
        task.set_steps(self._copy_steps(task, as_bytes(out), peer, tag))
        return self._started(task)

    def import_tensor(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer: int,
        tag: int,
        through: Callable[[torch.Tensor], Request] | None,
    ) -> ImportTask:
        """Start to import the tensor that a peer exports; one that comes in pieces is copied.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            peer: The peer.
            tag: The tag.
            through: Starts to receive it by another transport; None where the peer exports it.
        """
        import_task = ImportTask(("from", peer, tag), self._drive)
        if through is None:
            import_task.set_steps(self._import_steps(import_task, shape, dtype, peer, tag))
        else:
            import_task.set_steps(
                self._staged_import_steps(
                    import_task, empty_on(self._streams, shape, dtype), through
                )
            )
        return self._started(import_task)

    def _started(self, task: _ReceiveTaskT) -> _ReceiveTaskT:
        self._scheduler.add(task)
        self._drive()
        return task

    def _copy_steps(self, task: ReceiveTask, out: torch.Tensor, peer: int, tag: int) -> TaskSteps:
        message = yield from self._receive_message(task, peer, tag)
        yield from self._receive_pieces(task, out, peer, tag, message)
        yield None
        yield self._streams.record_event(StreamRole.COMPUTE)

    def _import_steps(
        self,
        import_task: ImportTask,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer: int,
        tag: int,
    ) -> TaskSteps:
        message = yield from self._receive_message(import_task, peer, tag)
        if message.last:
            source = self._importer.take(peer, message)
            tensor = source.view(dtype).view(shape)
            import_task.set_tensor(tensor, lambda: self._importer.acknowledge(peer, tag, message))
            return
        whole = empty_on(self._streams, shape, dtype)
        yield from self._receive_pieces(import_task, as_bytes(whole), peer, tag, message)
        import_task.set_tensor(whole)

    def _staged_import_steps(
        self,
        import_task: ImportTask,
        whole: torch.Tensor,
        through: Callable[[torch.Tensor], Request],
    ) -> TaskSteps:
        import_task.announced = True
        transfer = through(whole)
        yield None
        yield transfer
        import_task.set_tensor(whole)

    def _receive_pieces(
        self, task: ReceiveTask, out: torch.Tensor, peer: int, tag: int, message: ReadyMessage
    ) -> TaskSteps:
        """Copy piece after piece, and acknowledge each as soon as its copy is enqueued."""
        start = 0
        while True:
            source = self._importer.take(peer, message)
            if task.needed and message.size:
                self._streams.copy(out[start : start + message.size], source, StreamRole.COMPUTE)
            del source
            self._importer.acknowledge(peer, tag, message)
            start += message.size
            if message.last:
                return
            message = yield from self._receive_message(task, peer, tag)

    def _receive_message(
        self, task: ReceiveTask, peer: int, tag: int
    ) -> Generator[DeviceEvent | Request | PendingPeerRead | None, None, ReadyMessage]:
        message_buffer = allocate_message_buffer(READY_BYTES)
        yield self._ready_transport.irecv(message_buffer, peer, tag)
        task.announced = True
        return decode_message(message_buffer, ReadyMessage, peer)
