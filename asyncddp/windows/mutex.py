"""The mutex of a window: a rank keeps its own buffers, or those of others, as they are for a while.

Rank h has one *slot* for each in-neighbour w. Whoever holds slot (h, w), be it h or w, excludes the
other; two writers of one rank do not exclude each other. The slots lie with the holder's engine, of
which others ask for theirs by message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from asyncddp.engine import Engine

__all__ = ["FREE", "LOCK", "LOCKED", "Mutex"]

LOCK, LOCKED, FREE = "lock", "locked", "free"


class _Slot:
    """Who has it, and who waits for it."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.waiting: deque[int] = deque()


class Mutex:
    """The slots of one rank, and its way to those of others. The engine's lock guards them.

    Args:
        engine: Waits, and tells who is gone.
        rank: This rank.
        say: Sends one of the three words about this window to a peer.
        what: For messages.
    """

    def __init__(
        self, engine: Engine, rank: int, say: Callable[[int, str], None], what: str
    ) -> None:
        self._engine, self._rank, self._say, self._what = engine, rank, say, what
        self._slots: dict[int, _Slot] = {}
        self._mine: set[int] = set()  # ranks whose slot for this one is held here

    def acquire(self, holders: Iterable[int], writers: Iterable[int]) -> None:
        """Take slots for this rank, in an order that is the same on all ranks.

        Args:
            holders: Ranks whose slot for this one is taken.
            writers: Ranks for whom this one's own slot is taken.

        Raises:
            PeerLeftError: A rank that has one of them is gone.
            WaitTimeoutError: The deadline has passed; those taken so far are free again.
        """
        pairs = [(h, self._rank) for h in holders] + [(self._rank, w) for w in writers]
        taken: list[tuple[int, int]] = []
        for holder, writer in sorted(set(pairs)):
            try:
                self._take(holder, writer)
            except BaseException:
                self.release(
                    [h for h, w in taken if h != self._rank],
                    [w for h, w in taken if h == self._rank],
                )
                raise
            taken.append((holder, writer))

    def _take(self, holder: int, writer: int) -> None:
        if holder != self._rank:
            self._say(holder, LOCK)
            try:
                self._engine.attend(
                    lambda: holder in self._mine, f"{self._what} of rank {holder}", lambda: [holder]
                )
            except BaseException:
                self._say(holder, FREE)
                raise
            return
        with self._engine.parcels():
            slot = self._slots.setdefault(writer, _Slot())
            self._ask(slot, self._rank)
        try:
            self._engine.attend(
                lambda: slot.owner == self._rank, f"{self._what} of its own", lambda: [writer]
            )
        except BaseException:
            self._free(writer, self._rank)
            raise

    def release(self, holders: Iterable[int], writers: Iterable[int]) -> None:
        """Give slots back."""
        for holder in set(holders):
            self._mine.discard(holder)
            self._say(holder, FREE)
        for writer in set(writers):
            self._free(writer, self._rank)

    def hear(self, peer: int, word: str) -> None:
        """A peer asks for its slot, gives it back, or says that this rank has its own there."""
        if word == LOCKED:
            self._mine.add(peer)
        elif word == LOCK:
            self._ask(self._slots.setdefault(peer, _Slot()), peer)
        else:
            self._free(peer, peer)

    def _ask(self, slot: _Slot, rank: int) -> None:
        if slot.owner is None:
            self._grant(slot, rank)
        else:
            slot.waiting.append(rank)

    def _grant(self, slot: _Slot, rank: int) -> None:
        slot.owner = rank
        if rank != self._rank:
            self._say(rank, LOCKED)

    def _free(self, writer: int, rank: int) -> None:
        with self._engine.parcels():
            slot = self._slots.setdefault(writer, _Slot())
            if slot.owner != rank:
                if rank in slot.waiting:
                    slot.waiting.remove(rank)
                return
            slot.owner = None
            if slot.waiting:
                self._grant(slot, slot.waiting.popleft())
