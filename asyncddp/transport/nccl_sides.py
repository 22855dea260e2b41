"""The two sides of a pair: who leads, and who follows. See ``nccl_notes`` for what they say."""

from __future__ import annotations

import time

from asyncddp.transport.nccl_library import new_identity
from asyncddp.transport.nccl_notes import (
    Batch,
    Broken,
    Declined,
    Differs,
    Hello,
    Identity,
    Note,
    Ready,
    Withdraw,
    Withdrawn,
)
from asyncddp.transport.nccl_order import Book, Match, Offer
from asyncddp.transport.nccl_pair import Pair, Wire

__all__ = ["Follower", "Leader"]

_MOMENT = 0.0002  # seconds in which what goes the other way may join a group


class Leader(Pair):
    """The rank of lower number, which decides what goes when."""

    place = 0

    def __init__(self, wire: Wire, peer: int) -> None:
        super().__init__(wire, peer)
        self._book = Book()
        self._since: float | None = None

    def offered(self, offer: Offer) -> None:
        """This rank has begun something."""
        self._book.mine(offer)

    def struck_out(self, number: int) -> None:
        """This rank has given up what nobody has entered yet."""
        self._book.withdraw(number, mine=True)
        del self._waiting[number]

    def hear(self, note: Note) -> None:
        """Take what the follower says."""
        if isinstance(note, Broken):
            self.break_off(note.why, tell=False)
        elif self.broken is not None or self.staged:
            return
        elif isinstance(note, Hello):
            self._answer(note)
        elif isinstance(note, Ready):
            self._book.theirs(Offer(*note))
        elif isinstance(note, Withdraw) and self._book.withdraw(note.number, mine=False):
            self._wire.tell(self._peer, Withdrawn(note.number))

    def _answer(self, hello: Hello) -> None:
        if hello.room and self._wire.take_room():
            try:
                identity = new_identity(self._wire.library.nccl)
            except RuntimeError as problem:
                self.break_off(f"rank {self._wire.rank}: NCCL makes no identity ({problem})")
                return
            self._wire.tell(self._peer, Identity(identity))
            self.open(identity)
        else:
            self._wire.tell(self._peer, Declined())
            self.decline()

    def move(self) -> None:
        """Decide on a batch, tell the follower, and enter it."""
        if self._communicator is not None and self.broken is None and self._due():
            self._send_off(self._book.take())
        super().move()

    def _due(self) -> bool:
        """Whether to let go what may: a moment later where more may come the other way."""
        if not self._book.may_go():
            return False
        if self._book.one_way():
            now = time.monotonic()
            self._since = self._since or now
            if now - self._since < _MOMENT:
                return False
        self._since = None
        return True

    def _send_off(self, matches: list[Match]) -> None:
        messages, numbers = [], []
        for match in matches:
            message = self._waiting.pop(match.mine.number)
            if match.mine.size != match.theirs.size:
                self._wire.tell(self._peer, Differs(match.theirs.number, match.mine.size))
                self.differ(message, match.theirs.size)
                continue
            messages.append(message)
            numbers.append(match.theirs.number)
        if messages:
            self._wire.tell(self._peer, Batch(tuple(numbers)))
            self._batches.append(messages)


class Follower(Pair):
    """The rank of higher number, which says what it has and does what it is told."""

    place = 1

    def __init__(self, wire: Wire, peer: int) -> None:
        super().__init__(wire, peer)
        self._asked = False

    def offered(self, offer: Offer) -> None:
        """This rank has begun something."""
        if not self._asked:
            self._asked, self._room = True, self._wire.take_room()
            self._wire.tell(self._peer, Hello(self._room))
        self._wire.tell(self._peer, Ready(*offer))

    def struck_out(self, number: int) -> None:
        """This rank has given up what nobody has entered yet, as far as it knows.

        It stays listed until the leader says that it is forgotten: a batch that comes before that
        has it, and its bytes are dropped.
        """
        self._wire.tell(self._peer, Withdraw(number))

    def hear(self, note: Note) -> None:
        """Take what the leader says."""
        if isinstance(note, Broken):
            self.break_off(note.why, tell=False)
        elif self.broken is not None:
            return
        elif isinstance(note, Identity):
            self.open(note.identity)
        elif isinstance(note, Declined):
            if self._room:
                self._wire.give_room()
            self.decline()
        elif isinstance(note, Batch):
            self._batches.append([self._waiting.pop(number) for number in note.numbers])
        elif isinstance(note, Differs):
            self.differ(self._waiting.pop(note.number), note.size)
        elif isinstance(note, Withdrawn):
            del self._waiting[note.number]
