"""Message channel of two ranks over NCCL, in which both launch sends and receives in one order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import MismatchError, PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.nccl.communicator import NCCLCommunicator, PendingCommunicator
from asyncddp.transport.cuda.nccl.coordination_messages import (
    CommunicatorFailedMessage,
    CoordinationMessage,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from asyncddp.transport.cuda.nccl.match_table import RequestDescriptor
from asyncddp.transport.cuda.nccl.message_request import MessageRequest
from asyncddp.transport.cuda.nccl.pair_exchange import exchange, open_connected_pair


class PairChannelTransport(Protocol):
    """Interface of what a message channel of two ranks needs of the NCCL transport."""

    rank: int
    streams: DeviceStreams
    library: CupyBindings

    def tell(self, peer: int, message: CoordinationMessage) -> None:
        """Send a coordination message."""
        ...

    def drive(self) -> None:
        """Advance all pairs."""
        ...

    def acquire_budget(self) -> bool:
        """Take one communicator from the budget; return whether there was one."""
        ...

    def release_budget(self) -> None:
        """Return one communicator to the budget."""
        ...

    def stage(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Stage a message through the host."""
        ...


class PairChannel(ABC):
    """Base class of the messages to one peer over NCCL, one of both ranks ordering the launches.

    Args:
        transport: The transport.
        peer: The peer's rank.

    Attributes:
        staged: Whether messages between the two are staged.
        failure: Error that has broken the channel; None while it is usable.
    """

    pair_rank: int
    """This rank's number in the communicator, 0 or 1."""

    def __init__(self, transport: PairChannelTransport, peer: int) -> None:
        self._transport, self._peer = transport, peer
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
        """Post a send or a receive.

        Args:
            flat: Bytes.
            tag: Its tag.
            ready: Event of the device's work that precedes it.
            sends: Whether it is a send.

        Raises:
            PeerError: The channel is broken.
        """
        if self.failure is not None:
            raise self.failure
        if self.staged:
            return self._transport.stage(flat, self._peer, tag, sends=sends)
        descriptor = RequestDescriptor(self._next, sends, tag, flat.numel())
        self._next += 1
        request = self._waiting[descriptor.number] = MessageRequest(self, descriptor, flat, ready)
        self.announce(descriptor)
        self._transport.drive()
        return request

    def drive(self) -> None:
        """Advance all requests of the transport."""
        self._transport.drive()

    def cancel(self, request: MessageRequest) -> None:
        """Cancel a receive, or break the channel where both ranks have launched it."""
        if request.descriptor.number in self._waiting:
            self.cancelled(request.descriptor.number)
            return
        size, tag = request.descriptor.size, request.descriptor.tag
        self.fail(
            f"rank {self._transport.rank} has given up a receive of {size} bytes, tag {tag}, "
            "that both had entered"
        )

    # defined by leader and follower

    @abstractmethod
    def announce(self, descriptor: RequestDescriptor) -> None:
        """This rank has begun something."""

    @abstractmethod
    def cancelled(self, number: int) -> None:
        """This rank has given up what nobody has entered yet."""

    @abstractmethod
    def handle_message(self, message: CoordinationMessage) -> None:
        """Take what the other one says."""

    def move(self) -> None:
        """Go on as far as possible without waiting."""
        if self._communicator is None and self._opening is not None:
            self._communicator = self._opening.take()
            if self._opening.problem is not None:
                self.fail(
                    f"rank {self._transport.rank}: NCCL opens no communicator of the two "
                    f"({self._opening.problem})"
                )
        while self._communicator is not None and self._launches and self.failure is None:
            self._enter(self._communicator, self._launches.popleft())
        self._launched = [request for request in self._launched if not request.over]
        if self._launched and self._communicator is not None:
            why = self._communicator.failed()
            if why is not None and self.failure is None:
                self.fail(f"rank {self._transport.rank}: {why}")

    # what both do alike

    def open(self, unique_id: bytes) -> None:
        """Have a thread open the communicator, since that waits for the other one."""
        transport = self._transport
        self._opening = PendingCommunicator(
            partial(
                open_connected_pair, transport.library, transport.streams, unique_id, self.pair_rank
            )
        )

    def _enter(self, communicator: NCCLCommunicator, requests: Sequence[MessageRequest]) -> None:
        streams = self._transport.streams
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
                exchange(self._transport.library.nccl, self.pair_rank, parts),
                [flat for _, flat in parts],
                after,
            )
        except PeerError as problem:
            self._launched += requests
            self.fail(f"rank {self._transport.rank}: {problem}")
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
                request.staged = self._transport.stage(
                    request.flat, self._peer, request.descriptor.tag, sends=request.descriptor.sends
                )

    def fail_size_mismatch(self, request: MessageRequest, theirs: int) -> None:
        """Fail a request whose size differs from its counterpart's."""
        mine, tag = request.descriptor.size, request.descriptor.tag
        sent, taken = (mine, theirs) if request.descriptor.sends else (theirs, mine)
        giver, taker = self._transport.rank, self._peer
        if not request.descriptor.sends:
            giver, taker = taker, giver
        request.problem = MismatchError(
            f"rank {giver} sent {sent} bytes to rank {taker} with tag {tag}, which expected "
            f"{taken}: send and receive tensors of one size"
        )

    def fail(self, why: str, *, tell: bool = True) -> None:
        """Break the channel: abort the communicator and fail all requests.

        Args:
            why: The reason.
            tell: Whether to tell the peer.
        """
        if self.failure is not None:
            return
        self.failure = problem = PeerError(
            f"messages between rank {self._transport.rank} and rank {self._peer} by NCCL "
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
            self._transport.tell(self._peer, CommunicatorFailedMessage(why))

    def closer(self) -> Callable[[], None] | None:
        """Return the call that frees the communicator, if any; the caller runs it on a thread."""
        if self._communicator is not None:
            return self._communicator.closer()
        if self._opening is not None:
            return self._opening.abandon
        return None
