"""Message channel of two ranks over NCCL, in which both launch sends and receives in one order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import MismatchError, PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.nccl.communicator import (
    NCCLCommunicator,
    PendingCommunicator,
    exchange,
    open_connected_pair,
)
from asyncddp.transport.cuda.nccl.coordination_messages import (
    CommunicatorFailedMessage,
    CoordinationMessage,
    encode_message,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from asyncddp.transport.cuda.nccl.match_table import RequestDescriptor

_NOTHING = empty((0,), torch.uint8)


@dataclass
class PairResources:
    """Resources that a rank's channels to all its peers share."""

    rank: int
    streams: DeviceStreams
    library: CupyBindings
    message_transport: Transport
    """The host transport of coordination messages."""
    budget: threading.Semaphore
    """Number of communicators that this rank may still open."""
    stage: Callable[[torch.Tensor, int, int, bool], Request]
    """Stages a message through the host: its bytes, the peer, the tag, whether it is a send."""
    drive: Callable[[], None]
    """Advances all channels."""
    closed: bool = False

    def tell(self, peer: int, message: CoordinationMessage) -> None:
        """Send a coordination message."""
        if not self.closed:
            self.message_transport.post(peer, encode_message(message))


class MessageRequest:
    """Request of one send or receive between two ranks, carried out by NCCL.

    It waits until the other rank has its counterpart, is launched by both, and ends on the device.
    Where the pair has no communicator a staged request is used instead.
    """

    def __init__(
        self,
        channel: PairChannel,
        descriptor: RequestDescriptor,
        flat: torch.Tensor,
        ready: DeviceEvent,
    ) -> None:
        self._channel, self.descriptor, self.flat, self.ready = channel, descriptor, flat, ready
        self.event: DeviceEvent | None = None
        self.staged: Request | None = None
        self.problem: PeerError | None = None
        self.abandoned = False
        self._finished = False

    @property
    def over(self) -> bool:
        """True if the request has ended, with success or an error."""
        return self.problem is not None or self.finished()

    def finished(self) -> bool:
        """Return whether the device has completed it."""
        if not self._finished and self.event is not None and self.event.done():
            self.finish()
        return self._finished

    def finish(self) -> None:
        """Mark the request as completed, and release its tensor."""
        self._finished, self.flat = True, _NOTHING

    def done(self) -> bool:
        """Advance all requests of the transport; return whether this one is completed."""
        self._channel.drive()
        if self.problem is not None:
            raise self.problem
        return self.finished() if self.staged is None else self.staged.done()

    def abandon(self) -> None:
        """Abandon the request.

        A send goes all the same, since its receiver counts on it. A receive is cancelled unless
        both sides have launched it; then NCCL knows no other way than to abort the communicator.
        """
        again, self.abandoned = self.abandoned, True
        if self.staged is not None:
            self.staged.abandon()
        elif not (again or self.descriptor.sends or self.over):
            self._channel.cancel(self)


class PairChannel(ABC):
    """Base class of the messages to one peer over NCCL, one of both ranks ordering the launches.

    Once they have no communicator their messages are ``staged``; ``failure`` is the error that has
    broken the channel.
    """

    pair_rank: int
    """This rank's number in the communicator, 0 or 1."""

    def __init__(self, resources: PairResources, peer: int) -> None:
        self._resources, self._peer = resources, peer
        self._waiting: dict[int, MessageRequest] = {}
        self._launched: list[MessageRequest] = []
        self._next = 0
        self._opening: PendingCommunicator | None = None
        self._communicator: NCCLCommunicator | None = None
        self._launches: deque[Sequence[MessageRequest]] = deque()
        self.staged = False
        self.failure: PeerError | None = None

    # called by the transport

    def begin(self, flat: torch.Tensor, tag: int, ready: DeviceEvent, *, sends: bool) -> Request:
        """Post a send or a receive of bytes, after the work of the device that precedes an event.

        Raises:
            PeerError: The channel is broken.
        """
        if self.failure is not None:
            raise self.failure
        if self.staged:
            return self._resources.stage(flat, self._peer, tag, sends)
        descriptor = RequestDescriptor(self._next, sends, tag, flat.numel())
        self._next += 1
        request = self._waiting[descriptor.number] = MessageRequest(self, descriptor, flat, ready)
        self.announce(descriptor)
        self._resources.drive()
        return request

    def drive(self) -> None:
        """Advance all requests of the transport."""
        self._resources.drive()

    def cancel(self, request: MessageRequest) -> None:
        """Cancel a receive, or break the channel where both ranks have launched it."""
        if request.descriptor.number in self._waiting:
            self.cancelled(request.descriptor.number)
            return
        size, tag = request.descriptor.size, request.descriptor.tag
        self.fail(
            f"rank {self._resources.rank} has given up a receive of {size} bytes, tag {tag}, "
            "that both had entered"
        )

    # defined by leader and follower

    @abstractmethod
    def announce(self, descriptor: RequestDescriptor) -> None:
        """Announce a request that this rank has posted."""

    @abstractmethod
    def cancelled(self, number: int) -> None:
        """Give up a request of this rank that is not launched yet."""

    @abstractmethod
    def handle_message(self, message: CoordinationMessage) -> None:
        """Handle a message of the other rank."""

    def move(self) -> None:
        """Go on as far as possible without waiting."""
        if self._communicator is None and self._opening is not None:
            self._communicator = self._opening.take()
            if self._opening.problem is not None:
                self.fail(
                    f"rank {self._resources.rank}: NCCL opens no communicator of the two "
                    f"({self._opening.problem})"
                )
        while self._communicator is not None and self._launches and self.failure is None:
            self._enter(self._communicator, self._launches.popleft())
        self._launched = [request for request in self._launched if not request.over]
        if self._launched and self._communicator is not None:
            why = self._communicator.failed()
            if why is not None and self.failure is None:
                self.fail(f"rank {self._resources.rank}: {why}")

    # what both do alike

    def open(self, unique_id: bytes) -> None:
        """Have a thread open the communicator, since that waits for the other one."""
        library, streams = self._resources.library, self._resources.streams
        self._opening = PendingCommunicator(
            partial(open_connected_pair, library, streams, unique_id, self.pair_rank)
        )

    def _enter(self, communicator: NCCLCommunicator, requests: Sequence[MessageRequest]) -> None:
        streams = self._resources.streams
        after = [request.ready for request in requests]
        parts = []
        for request in requests:
            if request.descriptor.size:
                flat = request.flat
                dropped = request.abandoned and not request.descriptor.sends
                if dropped or flat.device != streams.device:
                    with streams.stream_context(StreamRole.COMPUTE):
                        flat = empty(flat.shape, flat.dtype, streams.device)
                    after.append(streams.record_event(StreamRole.COMPUTE))
                parts.append((request.descriptor.sends, flat))
            else:
                request.finish()
        if not parts:
            return
        try:
            event = communicator.enter(
                "messages",
                exchange(self._resources.library.nccl, self.pair_rank, parts),
                [flat for _, flat in parts],
                after,
            )
        except PeerError as problem:
            self._launched += requests
            self.fail(f"rank {self._resources.rank}: {problem}")
            return
        for request in requests:
            request.event = event
        self._launched += [request for request in requests if request.descriptor.size]

    def stage_all(self) -> None:
        """Stage all messages between the two from now on, also the waiting ones, in order."""
        self.staged = True
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            if request.descriptor.sends or not request.abandoned:
                descriptor = request.descriptor
                request.staged = self._resources.stage(
                    request.flat, self._peer, descriptor.tag, descriptor.sends
                )

    def fail_size_mismatch(self, request: MessageRequest, theirs: int) -> None:
        """Fail a request whose size differs from its counterpart's."""
        mine, tag = request.descriptor.size, request.descriptor.tag
        sent, taken = (mine, theirs) if request.descriptor.sends else (theirs, mine)
        giver, taker = self._resources.rank, self._peer
        if not request.descriptor.sends:
            giver, taker = taker, giver
        request.problem = MismatchError(
            f"rank {giver} sent {sent} bytes to rank {taker} with tag {tag}, which expected "
            f"{taken}: send and receive tensors of one size"
        )

    def fail(self, why: str, *, tell: bool = True) -> None:
        """Break the channel: abort the communicator, fail all requests, and ``tell`` the peer."""
        if self.failure is not None:
            return
        self.failure = problem = PeerError(
            f"messages between rank {self._resources.rank} and rank {self._peer} by NCCL "
            f"cannot go on: {why}. End and restart the run, or leave nccl out of "
            "ASYNCDDP_DEVICE_WIRES."
        )
        for request in (*self._waiting.values(), *chain(*self._launches), *self._launched):
            if not request.over:
                request.problem = problem
        self._waiting.clear()
        self._launches.clear()
        self._launched.clear()
        if self._communicator is not None:
            self._communicator.abort(why)
        elif self._opening is not None:
            self._opening.abandon()
        if tell:
            self._resources.tell(self._peer, CommunicatorFailedMessage(why))

    def closer(self) -> Callable[[], None] | None:
        """Return the call that frees the communicator, if any; the caller runs it on a thread."""
        if self._communicator is not None:
            return self._communicator.closer()
        if self._opening is not None:
            return self._opening.abandon
        return None
