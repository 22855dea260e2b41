"""Transfer tasks of the CUDA IPC transport: generators that yield the events they wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import DeviceEvent, DeviceStreams
from asyncddp.errors import PeerError
from asyncddp.serialization import pack
from asyncddp.transport.base import TRANSFER_ERRORS, Transport
from asyncddp.transport.cuda.ipc.ipc_messages import IPCMessage
from asyncddp.transport.cuda.pending_requests import PendingRequest, PendingRequests

TaskSteps: TypeAlias = Generator[DeviceEvent | None, None, None]
"""Generator that yields events to wait for, and None when the next task may start."""


class IPCResources(NamedTuple):
    """Resources shared by the CUDA IPC exporter and importer: streams, host transport, tasks."""

    streams: DeviceStreams
    message_transport: Transport
    tasks: PendingRequests
    drive: Callable[[], None]  # advances all of the transport

    def post(self, peer: int, message: IPCMessage) -> None:
        """Send a message to a peer."""
        self.message_transport.post(peer, pack(message))


class MessageCondition(NamedTuple):
    """Condition that a peer's message has arrived; raises a PeerError if the peer is lost."""

    peer: int
    transport: Transport
    has_come: Callable[[], bool]

    def done(self) -> bool:
        """Return whether the message has arrived."""
        come = self.has_come()
        if not come and (reason := self.transport.failed_peers().get(self.peer)):
            raise PeerError(f"rank {self.peer} is lost: {reason}")
        return come


class TransferTask(PendingRequest):
    """Base class of non-blocking tasks that transfer one tensor by CUDA IPC.

    Tasks with equal peer, tag and direction start one after the other.
    """

    sends = False
    steps: TaskSteps

    def __init__(self, peer: int, tag: int, drive: Callable[[], None]) -> None:
        super().__init__((self.sends, peer, tag), drive)
        self.peer, self.tag = peer, tag
        self._wait: DeviceEvent | None = None
        self.moves = 0  # how often it went on

    def advance(self, *, first: bool) -> None:
        """Advance as far as possible without waiting, if it is the first with its key."""
        try:
            while first and not self.over and (self._wait is None or self._wait.done()):
                self._wait = next(self.steps)
                self.moves += 1
                self.next_may_start = self.next_may_start or self._wait is None
        except StopIteration:
            self._end()
        except TRANSFER_ERRORS as problem:
            self._problem = problem
            self._end()

    def _end(self) -> None:
        self.next_may_start = self.over = True
        self.steps.close()
        self._wait = None

    def abandon(self) -> None:
        """Do nothing: the task continues, since the peer still reads the tensor."""


class SendTask(TransferTask):
    """Task that sends a tensor by CUDA IPC: the peer reads a copy in this rank's GPU memory."""

    sends = True
    copied = False  # True once the copy is enqueued
    waits_for_copy = False  # True if it is done only once the device has made the copy

    def reusable(self) -> bool:
        """Return whether the tensor may be overwritten."""
        return self.copied or self.done()


class ReceiveTask(TransferTask):
    """Task that receives a tensor from a peer by CUDA IPC."""

    announced = False  # True once the ready message has come
    needed = True  # False once the task was abandoned or released

    @override
    def abandon(self) -> None:  # the data is dropped where it was announced already
        self.needed = False
        if not self.announced:
            self._end()


class ImportTask(ReceiveTask):
    """Task that maps a peer's GPU tensor for reading in place, or copies it piece by piece.

    It is done once the compute stream may read the tensor.
    """

    _tensor: torch.Tensor | None = None
    _acknowledge: Callable[[], None] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The peer's tensor, available from completion to :meth:`release`; read-only."""
        if self._tensor is None:
            raise RuntimeError("expected an imported tensor that is done and not yet released")
        return self._tensor

    def set_tensor(
        self, tensor: torch.Tensor, acknowledge: Callable[[], None] | None = None
    ) -> None:
        """Set the tensor to read; ``acknowledge`` notifies its owner that reads are enqueued."""
        self._tensor, self._acknowledge = tensor, acknowledge
        if not self.needed:
            self.release()

    def release(self) -> None:
        """Notify the peer that all reads are enqueued on COMPUTE; a second call does nothing.

        A call before the task is done means that the tensor will not be read: the peer's export is
        released as soon as it arrives.
        """
        self.needed = False
        acknowledge, self._acknowledge, self._tensor = self._acknowledge, None, None
        if acknowledge is not None:
            acknowledge()

    @override
    def abandon(self) -> None:
        super().abandon()
        self.release()
