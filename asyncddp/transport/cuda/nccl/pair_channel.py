"""Message channel between two ranks over NCCL; both launch their operations in the same order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch

from asyncddp.device.stream_interfaces import DeviceEvent, DeviceStreams
from asyncddp.errors import MismatchError, PeerError
from asyncddp.serialization import pack
from asyncddp.tensors.allocation import empty
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.nccl.communicator import (
    NCCLCommunicator,
    abort_when_open,
    exchange,
    open_connected_pair,
    open_in_thread,
)
from asyncddp.transport.cuda.nccl.coordination_messages import (
    CommunicatorFailedMessage,
    CoordinationMessage,
    TransferPostedMessage,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings

_NOTHING = empty((0,), torch.uint8)


@dataclass(eq=False)
class SharedChannelResources(ABC):
    """Resources shared by a rank's NCCL channels to all peers, such as CUDA streams."""

    rank: int
    streams: DeviceStreams
    library: CupyBindings
    message_transport: Transport  # of coordination messages
    budget: threading.Semaphore  # communicators that this rank may still open
    stage: Callable[[torch.Tensor, int, int, bool], Request]
    """Stages a message through the host; arguments are bytes, peer, tag, and if it is a send."""
    closed: bool = field(default=False, init=False)

    def tell(self, peer: int, message: CoordinationMessage) -> None:
        """Send a coordination message."""
        if not self.closed:
            self.message_transport.post(peer, pack(message))

    @abstractmethod
    def drive(self) -> None:
        """Handle all coordination messages, and advance all channels."""


@dataclass(eq=False)
class PointToPointRequest:
    """Request of one send or receive between two ranks by NCCL.

    It completes once both ranks have posted it and this rank has launched it; the compute stream
    then waits for its end. If the pair has no communicator, a staged request is used instead.
    """

    channel: PairChannel
    descriptor: TransferPostedMessage
    flat: torch.Tensor
    ready: DeviceEvent
    staged: Request | None = None
    problem: PeerError | None = None
    abandoned: bool = False
    launched: bool = False

    def done(self) -> bool:
        """Advance all requests of the transport; return whether this one is complete."""
        self.channel.drive()
        if self.problem is not None:
            raise self.problem
        return self.launched if self.staged is None else self.staged.done()

    def abandon(self) -> None:
        """Cancel a receive, or discard its bytes if it is matched; a send is carried out."""
        self.abandoned = True
        if self.staged is not None:
            self.staged.abandon()
        elif not (self.descriptor.sends or self.launched):
            self.flat = _NOTHING
            self.channel.cancel(self.descriptor)


class PairChannel(ABC):
    """Base class of a rank's end of an NCCL channel to a peer: leader or follower."""

    pair_rank: int  # in the communicator, 0 or 1

    def __init__(self, resources: SharedChannelResources, peer: int) -> None:
        self._resources, self._peer = resources, peer
        self.drive = resources.drive
        self._waiting: dict[int, PointToPointRequest] = {}
        self._next = 0
        self._opening: Future[NCCLCommunicator] | None = None
        self._communicator: NCCLCommunicator | None = None
        self._launches: deque[Sequence[PointToPointRequest]] = deque()
        self.staged = False  # True once messages go through the host, without a communicator
        self.failure: PeerError | None = None  # what has broken the channel

    # called by the transport

    def begin(self, flat: torch.Tensor, tag: int, ready: DeviceEvent, *, sends: bool) -> Request:
        """Post a send or receive after an event; raise a PeerError if the channel is broken."""
        if self.failure is not None:
            raise self.failure
        descriptor = TransferPostedMessage(self._next, sends, tag, flat.numel())
        self._next += 1
        request = self._waiting[descriptor.number] = PointToPointRequest(
            self, descriptor, flat, ready
        )
        if self.staged:
            self.stage_all()
        else:
            self.announce(descriptor)
            self.drive()
        return request

    def connect(self) -> None:
        """Start to open the communicator, if this rank is the follower."""
        return

    def watch(self, timeout: float) -> bool:
        """Return whether messages are still running on the device; break a failed channel."""
        if self._communicator is None:
            return False
        busy = self._communicator.watch(timeout)
        if self._communicator.why is not None:
            self.fail(f"rank {self._resources.rank}: {self._communicator.why}")
        return busy

    def leave(self) -> None:
        """Break the channel before this rank leaves, if the peer may have launched messages."""
        waiting = any(not request.abandoned for request in self._waiting.values())
        if not self.staged and (waiting or self._launches):
            self.fail(f"rank {self._resources.rank} has left")

    def handle_message(self, message: CoordinationMessage) -> None:
        """Handle a coordination message of the peer."""
        if isinstance(message, CommunicatorFailedMessage):
            self.fail(message.why, tell=False)
        elif self.failure is None and not self.staged:
            self.follow(message)

    # defined by leader and follower

    @abstractmethod
    def announce(self, descriptor: TransferPostedMessage) -> None:
        """Announce a request that this rank has posted to the leader."""

    @abstractmethod
    def cancel(self, descriptor: TransferPostedMessage) -> None:
        """Cancel a receive, unless it has been matched."""

    @abstractmethod
    def follow(self, message: CoordinationMessage) -> None:
        """Handle a coordination message according to this rank's role, while NCCL is used."""

    def move(self) -> None:
        """Advance as far as possible without waiting."""
        if self._communicator is None and self._opening is not None and self._opening.done():
            problem = self._opening.exception()
            if problem is None:
                self._communicator = self._opening.result()
            else:
                self.fail(
                    f"rank {self._resources.rank}: NCCL opens no communicator of the two "
                    f"({problem})"
                )
        while self._communicator is not None and self._launches and self.failure is None:
            self.launch(self._communicator, self._launches.popleft())

    # what both do alike

    def open(self, unique_id: bytes) -> None:
        """Start to open the communicator in a thread, since opening waits for the peer."""
        library, streams = self._resources.library, self._resources.streams
        self._opening = open_in_thread(
            partial(open_connected_pair, library, streams, unique_id, self.pair_rank), streams
        )

    def launch(
        self, communicator: NCCLCommunicator, requests: Sequence[PointToPointRequest]
    ) -> bool:
        """Enqueue a group of requests on the device, and complete them; False if NCCL fails."""
        device, parts = self._resources.streams.device, []
        after = [request.ready for request in requests]
        for request in requests:
            flat, sends = request.flat, request.descriptor.sends
            if flat.device != device or (request.abandoned and not sends):  # dropped bytes
                flat = communicator.allocate(request.descriptor.size)
            if flat.numel():
                parts.append((sends, flat))
        if parts:
            call = exchange(self._resources.library.nccl, self.pair_rank, parts)
            try:
                event = communicator.enter("messages", call, [flat for _, flat in parts], after)
            except PeerError as problem:
                self._launches.appendleft(requests)
                self.fail(f"rank {self._resources.rank}: {problem}")
                return False
            communicator.order_compute(f"a group of {len(parts)} messages", event)
        for request in requests:
            request.launched, request.flat = True, _NOTHING  # its stream keeps the tensor
        return True

    def stage_all(self) -> None:
        """Stage all waiting and later messages of the pair, in order."""
        self.staged = True
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            sends = request.descriptor.sends
            if sends or not request.abandoned:
                request.staged = self._resources.stage(
                    request.flat, self._peer, request.descriptor.tag, sends
                )

    def fail_size_mismatch(self, request: PointToPointRequest, theirs: int) -> None:
        """Fail a request whose size differs from its matching request."""
        here, there = (self._resources.rank, request.descriptor.size), (self._peer, theirs)
        sender, receiver = (here, there) if request.descriptor.sends else (there, here)
        request.problem = MismatchError(
            f"rank {sender[0]} sent {sender[1]} bytes to rank {receiver[0]} with tag "
            f"{request.descriptor.tag}, which expected {receiver[1]}: send and receive tensors of "
            "one size"
        )

    def fail(self, why: str, *, tell: bool = True) -> None:
        """Break the channel: abort the communicator, fail all requests, notify the peer."""
        if self.failure is not None:
            return
        self.failure = problem = PeerError(
            f"messages between rank {self._resources.rank} and rank {self._peer} by NCCL "
            f"cannot go on: {why}. End and restart the run, or leave nccl out of "
            "ASYNCDDP_DEVICE_TRANSPORTS."
        )
        for request in (*self._waiting.values(), *chain(*self._launches)):
            request.problem = problem
        self._waiting.clear()
        self._launches.clear()
        if self._communicator is not None:
            self._communicator.abort(why)
        elif self._opening is not None:
            abort_when_open(self._opening)
        if tell:
            self._resources.tell(self._peer, CommunicatorFailedMessage(why))

    def closer(self) -> Callable[[], None]:
        """Return the function that frees the communicator; the caller runs it in a thread."""
        if self._communicator is not None:
            return self._communicator.closer()
        return partial(abort_when_open, self._opening) if self._opening else lambda: None
