"""Sending side of CUDA IPC: lets a peer read a tensor in place, or a copy of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.direct_read import ExportRequest
from asyncddp.transport.cuda.ipc.exported_memory import ExportedMemory, ExportedMemoryPool
from asyncddp.transport.cuda.ipc.exporter import MemoryExporter, PendingPeerRead
from asyncddp.transport.cuda.ipc.tasks import SendTask, TaskScheduler, TaskSteps

MAX_COPY_BYTES = 1 << 28
"""Most bytes of a tensor that is copied as a whole; larger ones are copied in pieces."""
_PIECE = 1 << 26  # bytes of the pieces of a larger one
_DEPTH = 2  # most unread pieces
_MIN_IN_PLACE_BYTES = 1 << 20  # from which a tensor is exported in place where that is safe


class IPCTensorSender:
    """Sender that lets peers with access to this GPU's memory read tensors, or copies, in place.

    Args:
        streams: Streams of the device.
        memory: The pool of exported memory.
        exporter: Announces it to peers.
        scheduler: Runs the tasks.
        drive: Advances all tasks.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        memory: ExportedMemoryPool,
        exporter: MemoryExporter,
        scheduler: TaskScheduler,
        drive: Callable[[], None],
    ) -> None:
        self._streams, self._memory, self._exporter = streams, memory, exporter
        self._scheduler, self._drive = scheduler, drive

    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float, *, lasting: bool
    ) -> dict[int, SendTask]:
        """Export a tensor, or a multiple of one that is no larger than ``MAX_COPY_BYTES``.

        Args:
            data: Contiguous.
            tags: The tag for each peer.
            factor: With which it is multiplied.
            lasting: Whether it stays unchanged until all peers have acknowledged it.
        """
        self._streams.record_stream(data, StreamRole.COMPUTE)
        scheduler = {peer: SendTask(("to", peer, tag), self._drive) for peer, tag in tags.items()}
        exported: ExportedMemory | None = None
        if lasting and factor == 1.0 and data.nbytes >= _MIN_IN_PLACE_BYTES:
            exported = self._memory.export_if_resent(data, tags)
        buffer = None
        if exported is None and 0 < data.nbytes <= MAX_COPY_BYTES:
            buffer = self._make_copy(data, factor, len(tags))
        for peer, task in scheduler.items():
            if exported is not None:
                task.set_steps(self._export_in_place(data, exported, peer, tags[peer]))
            elif data.nbytes > MAX_COPY_BYTES:
                task.set_steps(self._export_in_pieces(task, as_bytes(data), peer, tags[peer]))
            else:
                task.copied = True
                task.set_steps(self._export_copy(buffer, data.nbytes, peer, tags[peer]))
            self._scheduler.add(task)
        self._drive()
        return scheduler

    def _make_copy(self, data: torch.Tensor, factor: float, pending_acks: int) -> ExportedMemory:
        buffer = self._memory.take(data.nbytes, pending_acks)
        room = buffer.memory[: data.nbytes]
        if factor == 1.0:
            self._streams.copy(room, as_bytes(data), StreamRole.COMPUTE)
        else:
            with self._streams.stream_context(StreamRole.COMPUTE):
                torch.mul(data, factor, out=room.view(data.dtype).view(data.shape))
        return buffer

    def _export_in_place(
        self, data: torch.Tensor, exported: ExportedMemory, peer: int, tag: int
    ) -> TaskSteps:
        """Export the tensor in place; it is kept until the peer has acknowledged it."""
        start = data.data_ptr() - data.untyped_storage().data_ptr()
        pending_read = self._exporter.announce(
            peer, tag, exported, start, data.nbytes, buffer=False
        )
        yield None
        yield pending_read

    def _export_copy(
        self, buffer: ExportedMemory | None, size: int, peer: int, tag: int
    ) -> TaskSteps:
        pending_read = self._exporter.announce(peer, tag, buffer, 0, size)
        yield None
        yield pending_read

    def _export_in_pieces(
        self, task: SendTask, flat: torch.Tensor, peer: int, tag: int
    ) -> TaskSteps:
        """Export copies of pieces, with a few buffers in turn."""
        pending_reads: deque[PendingPeerRead] = deque()
        for first in range(0, flat.numel(), _PIECE):
            if len(pending_reads) == _DEPTH:
                yield pending_reads.popleft()
            piece = flat[first : first + _PIECE]
            buffer = self._make_copy(piece, 1.0, 1)
            last = first + _PIECE >= flat.numel()
            pending_reads.append(
                self._exporter.announce(peer, tag, buffer, 0, piece.numel(), last=last)
            )
        task.copied = True
        yield None
        yield from pending_reads


class CopiedSendRequest:
    """Send request that is done once the tensor was copied and the peer has enqueued its read.

    Args:
        export: The export request of the copy.
        streams: Streams of the device.
    """

    def __init__(self, export: ExportRequest, streams: DeviceStreams) -> None:
        self._export, self._streams = export, streams
        self._made: DeviceEvent | None = None

    def done(self) -> bool:
        """Return whether the copy was made and the peer has enqueued its read."""
        if self._made is None and self._export.reusable():
            self._made = self._streams.record_event(StreamRole.COMPUTE)
        return self._export.done() and self._made is not None and self._made.done()

    def abandon(self) -> None:
        """Abandon the export request."""
        self._export.abandon()


class StagedExportRequest:
    """Export request whose tensor is sent through host memory instead of read in place.

    Args:
        transfer: The staged send.
    """

    def __init__(self, transfer: Request) -> None:
        self._transfer = transfer
        self.done, self.abandon = transfer.done, transfer.abandon

    def reusable(self) -> bool:
        """Return whether the tensor was sent."""
        return self._transfer.done()
