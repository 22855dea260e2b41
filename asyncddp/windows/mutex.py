"""The mutex of a window: a rank keeps its own buffers, or those of others, as they are for a while.

Rank h has one *slot* for each in-neighbour w. Whoever holds slot (h, w), be it h or w, excludes the
other; two writers of one rank do not exclude each other. The slots lie with the holder's engine, of
which others ask for theirs by message. Threads of one rank exclude each other as well, and one that
has a slot may take it again.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from asyncddp.engine import Engine
from asyncddp.errors import WaitTimeoutError

__all__ = ["FREE", "LOCK", "LOCKED", "Mutex"]

LOCK, LOCKED, FREE = "lock", "locked", "free"


class _Claim(NamedTuple):
    """Somebody's wish for a slot; the ticket tells it from earlier ones."""

    rank: int
    ticket: int


class _Slot:
    """Who has it, and who waits for it."""

    def __init__(self) -> None:
        self.owner: _Claim | None = None
        self.waiting: deque[_Claim] = deque()


class _Guard:
    """What threads of this rank do with a slot: one has it, so many times over."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = self.ticket = 0


class Mutex:
    """The slots of one rank, and its way to those of others. The engine's lock guards them.

    Args:
        engine: Waits, and tells who is gone.
        rank: This rank.
        say: Sends one of the three words about this window, and a ticket, to a peer.
        insist: Raises where the window is of no use any more.
        what: For messages.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        say: Callable[[int, str, int], None],
        insist: Callable[[], None],
        what: str,
    ) -> None:
        self._engine, self._rank, self._say, self._what = engine, rank, say, what
        self._insist = insist
        self._slots: dict[int, _Slot] = {}
        self._guards: dict[tuple[int, int], _Guard] = {}
        self._tickets = itertools.count(1)
        self._granted: dict[int, bool] = {}  # this rank's tickets that are out

    def acquire(self, holders: Iterable[int], writers: Iterable[int]) -> None:
        """Take slots for this thread, in an order that is the same on all ranks.

        Args:
            holders: Ranks whose slot for this one is taken.
            writers: Ranks for whom this one's own slot is taken.

        Raises:
            PeerLeftError: A rank that has one of them is gone.
            WaitTimeoutError: The deadline has passed; those taken so far are free again.
        """
        taken: list[tuple[int, int]] = []
        try:
            for pair in self._pairs(holders, writers):
                self._enter(pair)
                taken.append(pair)
        except BaseException:
            for pair in taken:
                self._exit(pair)
            raise

    def release(self, holders: Iterable[int], writers: Iterable[int]) -> None:
        """Give slots back."""
        for pair in self._pairs(holders, writers):
            self._exit(pair)

    def hear(self, peer: int, word: str, ticket: int) -> None:
        """A peer asks for its slot, gives it back, or says that this rank has its own there."""
        if word == LOCKED:
            if ticket in self._granted:
                self._granted[ticket] = True
        elif word == LOCK:
            self._ask(peer, _Claim(peer, ticket))
        else:
            self._free(peer, _Claim(peer, ticket))

    def _pairs(self, holders: Iterable[int], writers: Iterable[int]) -> list[tuple[int, int]]:
        return sorted({*((h, self._rank) for h in holders), *((self._rank, w) for w in writers)})

    def _enter(self, pair: tuple[int, int]) -> None:
        guard, limit = self._guards.setdefault(pair, _Guard()), self._engine.config.timeout
        if not guard.lock.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise WaitTimeoutError(
                f"rank {self._rank}: {self._what} was not free in {limit:g} s "
                f"(ASYNCDDP_TIMEOUT={limit:g}); another thread of this rank holds it"
            )
        try:
            if guard.depth == 0:
                guard.ticket = self._take(*pair)
            guard.depth += 1
        except BaseException:
            guard.lock.release()
            raise

    def _exit(self, pair: tuple[int, int]) -> None:
        guard = self._guards[pair]
        guard.depth -= 1
        try:
            if guard.depth == 0:
                self._give(*pair, guard.ticket)
        finally:
            guard.lock.release()

    def _take(self, holder: int, writer: int) -> int:
        """Claim a slot and wait for it; gives the ticket."""
        ticket = next(self._tickets)
        own = holder == self._rank
        self._granted[ticket] = False
        if own:
            with self._engine.parcels():
                self._ask(writer, _Claim(self._rank, ticket))
        else:
            self._say(holder, LOCK, ticket)
        if self._granted[ticket]:
            return ticket

        def granted() -> bool:
            """Whether all of it is held."""
            self._insist()
            return self._granted[ticket]

        what = f"{self._what} {'for' if own else 'at'} rank {writer if own else holder}"
        try:
            self._engine.attend(granted, what, lambda: [writer if own else holder])
        except BaseException:
            self._give(holder, writer, ticket)
            raise
        return ticket

    def _give(self, holder: int, writer: int, ticket: int) -> None:
        self._granted.pop(ticket, None)
        if holder == self._rank:
            with self._engine.parcels():
                self._free(writer, _Claim(self._rank, ticket))
        else:
            self._say(holder, FREE, ticket)

    # the slots of this rank, under the engine's lock

    def _ask(self, writer: int, claim: _Claim) -> None:
        slot = self._slots.setdefault(writer, _Slot())
        if slot.owner is None:
            self._grant(slot, claim)
        else:
            slot.waiting.append(claim)

    def _grant(self, slot: _Slot, claim: _Claim) -> None:
        slot.owner = claim
        if claim.rank == self._rank:
            self._granted[claim.ticket] = True
        else:
            self._say(claim.rank, LOCKED, claim.ticket)

    def _free(self, writer: int, claim: _Claim) -> None:
        slot = self._slots.setdefault(writer, _Slot())
        if slot.owner != claim:
            if claim in slot.waiting:
                slot.waiting.remove(claim)
            return
        slot.owner = None
        if slot.waiting:
            self._grant(slot, slot.waiting.popleft())
