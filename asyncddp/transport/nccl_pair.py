"""Two ranks and the communicator between them: what both enter, in one order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from asyncddp.errors import MismatchError, PeerError
from asyncddp.memory.allocate import empty
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.transport.contract import Transfer
from asyncddp.transport.nccl_communicator import Communicator, Opening
from asyncddp.transport.nccl_group import connected, exchange
from asyncddp.transport.nccl_library import Library
from asyncddp.transport.nccl_message import Message
from asyncddp.transport.nccl_notes import Broken, Note
from asyncddp.transport.nccl_order import Offer

__all__ = ["Pair", "Wire"]


class Wire(Protocol):
    """What a pair needs of the wire that it belongs to."""

    rank: int
    streams: DeviceStreams
    library: Library

    def tell(self, peer: int, note: Note) -> None:
        """Send a note."""
        ...

    def drive(self) -> None:
        """Move all pairs on."""
        ...

    def take_room(self) -> bool:
        """Whether there is room for one more communicator, which is then taken."""
        ...

    def give_room(self) -> None:
        """Give room back."""
        ...

    def stage(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Transfer:
        """Carry a message through the host."""
        ...


class Pair(ABC):
    """This rank's side of a pair; :class:`Leader` and :class:`Follower` are the two sides.

    Args:
        wire: The wire.
        peer: The other rank.

    Attributes:
        staged: Whether what goes between the two is staged.
        broken: What has made an end of all; None while it goes on.
    """

    place: int
    """This rank's number in the communicator of the two."""

    def __init__(self, wire: Wire, peer: int) -> None:
        self._wire, self._peer = wire, peer
        self._waiting: dict[int, Message] = {}
        self._entered: list[Message] = []
        self._next = 0
        self._opening: Opening | None = None
        self._communicator: Communicator | None = None
        self._batches: deque[Sequence[Message]] = deque()
        self.staged = False
        self.broken: PeerError | None = None

    # what the caller does

    def begin(self, flat: torch.Tensor, tag: int, ready: Event, *, sends: bool) -> Transfer:
        """Begin a send or a receive.

        Args:
            flat: Bytes.
            tag: Its tag.
            ready: What comes before it on the device.
            sends: Whether it is a send.

        Raises:
            PeerError: An end was made of the pair's communicator.
        """
        if self.broken is not None:
            raise self.broken
        if self.staged:
            return self._wire.stage(flat, self._peer, tag, sends=sends)
        offer = Offer(self._next, sends, tag, flat.numel())
        self._next += 1
        message = self._waiting[offer.number] = Message(self, offer, flat, ready)
        self.offered(offer)
        self._wire.drive()
        return message

    def drive(self) -> None:
        """Move all messages of the wire on."""
        self._wire.drive()

    def withdraw(self, message: Message) -> None:
        """A receive is given up."""
        if message.offer.number in self._waiting:
            self.struck_out(message.offer.number)
            return
        size, tag = message.offer.size, message.offer.tag
        self.break_off(
            f"rank {self._wire.rank} has given up a receive of {size} bytes, tag {tag}, that both "
            "had entered"
        )

    # what the sides do, each in its way

    @abstractmethod
    def offered(self, offer: Offer) -> None:
        """This rank has begun something."""

    @abstractmethod
    def struck_out(self, number: int) -> None:
        """This rank has given up what nobody has entered yet."""

    @abstractmethod
    def hear(self, note: Note) -> None:
        """Take what the other one says."""

    def move(self) -> None:
        """Go on as far as possible without waiting."""
        if self._communicator is None and self._opening is not None:
            self._communicator = self._opening.take()
            if self._opening.problem is not None:
                self.break_off(
                    f"rank {self._wire.rank}: NCCL opens no communicator of the two "
                    f"({self._opening.problem})"
                )
        while self._communicator is not None and self._batches and self.broken is None:
            self._enter(self._communicator, self._batches.popleft())
        self._entered = [message for message in self._entered if not message.over]
        if self._entered and self._communicator is not None:
            why = self._communicator.failed()
            if why is not None and self.broken is None:
                self.break_off(f"rank {self._wire.rank}: {why}")

    # what both do alike

    def open(self, identity: bytes) -> None:
        """Have a thread open the communicator, since that waits for the other one."""
        wire = self._wire
        self._opening = Opening(
            partial(connected, wire.library, wire.streams, identity, self.place)
        )

    def _enter(self, communicator: Communicator, messages: Sequence[Message]) -> None:
        streams = self._wire.streams
        after = [message.ready for message in messages]
        parts = []
        for message in messages:
            if message.offer.size:
                flat = message.flat
                dropped = message.given_up and not message.offer.sends
                if dropped or flat.device != streams.device:
                    with streams.working(Queue.WORK):
                        flat = empty(flat.shape, flat.dtype, streams.device)
                    after.append(streams.mark(Queue.WORK))
                parts.append((message.offer.sends, flat))
            else:
                message.land()
        if not parts:
            return
        try:
            event = communicator.enter(
                "messages",
                exchange(self._wire.library.nccl, self.place, parts),
                [flat for _, flat in parts],
                after,
            )
        except PeerError as problem:
            self._entered += messages
            self.break_off(f"rank {self._wire.rank}: {problem}")
            return
        for message in messages:
            message.event = event
        self._entered += [message for message in messages if message.offer.size]

    def decline(self) -> None:
        """Nothing goes by NCCL between the two: hand all that waits over, in its order."""
        self.staged = True
        waiting, self._waiting = self._waiting, {}
        for message in waiting.values():
            if message.offer.sends or not message.given_up:
                message.staged = self._wire.stage(
                    message.flat, self._peer, message.offer.tag, sends=message.offer.sends
                )

    def differ(self, message: Message, theirs: int) -> None:
        """Fail a message whose size is another one at the other side."""
        mine, tag = message.offer.size, message.offer.tag
        sent, taken = (mine, theirs) if message.offer.sends else (theirs, mine)
        giver, taker = self._wire.rank, self._peer
        if not message.offer.sends:
            giver, taker = taker, giver
        message.problem = MismatchError(
            f"rank {giver} sent {sent} bytes to rank {taker} with tag {tag}, which expected "
            f"{taken}: send and receive tensors of one size"
        )

    def break_off(self, why: str, *, tell: bool = True) -> None:
        """Make an end of the communicator and of all messages.

        Args:
            why: The reason.
            tell: Whether the other one has yet to hear of it.
        """
        if self.broken is not None:
            return
        self.broken = problem = PeerError(
            f"messages between rank {self._wire.rank} and rank {self._peer} by NCCL cannot go on: "
            f"{why}. End and restart the run, or leave nccl out of ASYNCDDP_DEVICE_WIRES."
        )
        for message in (*self._waiting.values(), *chain(*self._batches), *self._entered):
            if not message.over:
                message.problem = problem
        self._waiting.clear()
        self._batches.clear()
        self._entered.clear()
        if self._communicator is not None:
            self._communicator.abort(why)
        elif self._opening is not None:
            self._opening.abandon()
        if tell:
            self._wire.tell(self._peer, Broken(why))

    def ending(self) -> Callable[[], None] | None:
        """What gives the communicator back, if there is one: the caller has it run apart."""
        if self._communicator is not None:
            return self._communicator.ending()
        if self._opening is not None:
            return self._opening.abandon
        return None
