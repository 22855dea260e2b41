"""``cuda_ipc``: transport that reads the GPU memory of other processes on the same machine.

The sender copies its tensor into a buffer, records an event, and posts a ready message that names
both. The receiver makes its stream wait for that event, enqueues the work that reads the memory in
place, records an event after it, and posts a done message; the sender makes its stream wait for
that event before it reuses the memory. The host never waits for a GPU. Collectives are staged. Run
between processes that share a GPU; where there is none, tests share host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.errors import PeerError
from asyncddp.transport.base import Request, Scope, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, have_peer_access, unknown_gpu
from asyncddp.transport.cuda.device_transport import DirectReadTransport
from asyncddp.transport.cuda.ipc.exporter import MemoryExporter
from asyncddp.transport.cuda.ipc.importer import MemoryImporter
from asyncddp.transport.cuda.ipc.ipc_messages import (
    CloseMemoryMessage,
    ReadyMessage,
    decode_message,
)
from asyncddp.transport.cuda.ipc.ipc_tasks import ImportTask, IPCResources, SendTask
from asyncddp.transport.cuda.pending_requests import PendingRequests
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport

_LEAVE_TIMEOUT = 1.0  # seconds for peers to leave too, so that memory can be freed


class CudaIPCTransport(CudaStagedTransport, DirectReadTransport):
    """Transport by CUDA IPC between ranks of one machine with access to each other's GPU memory.

    References:
        CUDA C++ Programming Guide, "Interprocess Communication"; CUDA samples, ``simpleIPC``;
        PyTorch documentation, ``torch.multiprocessing``, "Sharing CUDA tensors".
    """

    name = "cuda_ipc"
    scope = Scope.MACHINE
    local_path = "a copy on the GPU is read where it lies; collectives are staged"

    def __init__(
        self,
        base: Transport,
        streams: DeviceStreams,
        reachable: Collection[int],
        message_transport: Transport,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(base, streams)
        self._timeout = timeout
        self._reachable, self._closed = frozenset(reachable), False
        self._message_transport, self._tasks = message_transport, PendingRequests()
        shared = IPCResources(streams, message_transport, self._tasks, self._drive_tasks)
        self._exporter, self._importer = MemoryExporter(shared), MemoryImporter(shared)
        self.memory = self._exporter.memory

    @classmethod
    def open(
        cls, base: Transport, streams: DeviceStreams, reachable: Collection[int], timeout: float
    ) -> CudaIPCTransport:
        """Open the transport, with a separate host transport for its messages; collective."""
        return cls(base, streams, reachable, base.split(0, base.rank), timeout)

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Return an obstacle unless both GPUs have access to each other's memory."""
        if have_peer_access(one, other):
            return None
        apart = f"rank {one.rank} and rank {other.rank} do not read each other's GPU memory"
        return unknown_gpu(one, other) or apart

    # messages

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Export a copy; done once the copy is made and the peer has enqueued its read."""
        if peer == self.rank:
            return super().isend(data, peer, tag)
        return self._exporter.export_tensor(data, {peer: tag}, 1.0, wait=True)[peer]

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to copy the peer's exported tensor; done once it has been copied."""
        if peer == self.rank:
            return super().irecv(out, peer, tag)
        return self._importer.copy(out, peer, tag)

    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float = 1.0
    ) -> Mapping[int, SendTask]:
        """Export a copy of a tensor, times a factor, to peers."""
        return self._exporter.export_tensor(data, tags, factor)

    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> ImportTask:
        """Start to import the peer's exported tensor, to be read in place."""
        return self._importer.import_tensor(shape, dtype, peer, tag)

    # progress

    def _drive_tasks(self) -> None:
        if self._closed:
            return
        for peer, data in self._message_transport.poll():
            message = decode_message(data, peer)
            if isinstance(message, (ReadyMessage, CloseMemoryMessage)):
                self._importer.receive(peer, message)
            else:
                self._exporter.receive(peer, message)
        self._importer.close_retired()
        self._tasks.advance()

    def watch(self, timeout: float) -> object:
        """Advance all tasks and staged requests."""
        self._drive_tasks()
        return super().watch(timeout)

    def free(self) -> None:
        """Close the message transport without waiting; memory is freed when peers close it."""
        self._closed = True
        self._tasks.clear()
        self._message_transport.close()

    def close(self) -> None:
        """Wait until peers have read all exports or leave, too; then close all transports.

        For a peer that does neither, such as one that calls fewer verbs, it waits until the
        timeout.
        """
        if not self._closed:
            with suppress(PeerError):  # an exited peer reads nothing
                self._drive_until(lambda: not self._importer.busy, self._timeout)
                self._tasks[:] = [task for task in self._tasks if isinstance(task, SendTask)]
                self._importer.close(self._reachable)
                self._drive_until(lambda: not self._exporter.busy, self._timeout)
            self._tasks.clear()
            with suppress(PeerError):
                self._drive_until(lambda: self._reachable <= self.memory.left, _LEAVE_TIMEOUT)
            self._closed = True
            if self._reachable <= self.memory.left:
                self.memory.close()
            self._message_transport.close()
        super().close()

    def _drive_until(self, condition: Callable[[], bool], timeout: float) -> None:
        attempt, deadline = 0, time.monotonic() + timeout
        self._drive_tasks()
        while not condition() and time.monotonic() < deadline:
            self.base.backoff(attempt)
            attempt += 1
            self._drive_tasks()
