"""Which sends meet which receives between two ranks, and in what order they go. No I/O."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

__all__ = ["Book", "Match", "Offer"]


class Offer(NamedTuple):
    """A send or a receive that one of the two has begun.

    Attributes:
        number: Its number with whoever has begun it.
        sends: Whether it is a send.
        tag: Its tag.
        size: Its bytes.
    """

    number: int
    sends: bool
    tag: int
    size: int


class Match(NamedTuple):
    """A send and a receive that belong together: the leader's, and the follower's."""

    mine: Offer
    theirs: Offer


_Line: TypeAlias = tuple[bool, int]  # whether the leader sends, and the tag


class Book:
    """What the leader of a pair knows of both sides.

    Offers of equal direction and tag meet in the order in which each side has begun them.

    Example:
        >>> book = Book()
        >>> book.mine(Offer(0, True, 7, 8))
        >>> book.theirs(Offer(5, False, 7, 8))
        >>> [(match.mine.number, match.theirs.number) for match in book.take()]
        [(0, 5)]
    """

    def __init__(self) -> None:
        self._mine: dict[_Line, deque[Offer]] = {}
        self._theirs: dict[_Line, deque[Offer]] = {}

    def mine(self, offer: Offer) -> None:
        """The leader has begun something."""
        self._mine.setdefault((offer.sends, offer.tag), deque()).append(offer)

    def theirs(self, offer: Offer) -> None:
        """The follower has begun something."""
        self._theirs.setdefault((not offer.sends, offer.tag), deque()).append(offer)

    def withdraw(self, number: int, *, mine: bool) -> bool:
        """Strike out what one side has given up.

        Args:
            number: Its number.
            mine: Whether it is the leader's.

        Returns:
            Whether it was there; else it has gone.
        """
        side = self._mine if mine else self._theirs
        for line, waiting in side.items():
            for offer in waiting:
                if offer.number == number:
                    waiting.remove(offer)
                    if not waiting:
                        del side[line]
                    return True
        return False

    def _met(self) -> list[_Line]:
        return [line for line in self._mine if line in self._theirs]

    def one_way(self) -> bool:
        """Whether all that may go goes one way, and the leader waits for what would go the other.

        Example:
            >>> book = Book()
            >>> for offer in (Offer(0, True, 1, 8), Offer(1, False, 1, 8)):
            ...     book.mine(offer)
            >>> book.theirs(Offer(0, False, 1, 8))
            >>> book.one_way()
            True
            >>> book.theirs(Offer(1, True, 1, 8))
            >>> book.one_way()
            False
        """
        ways = {sends for sends, _ in self._met()}
        return len(ways) == 1 and any(sends not in ways for sends, _ in self._mine)

    def may_go(self) -> bool:
        """Whether something has met."""
        return bool(self._met())

    def take(self) -> list[Match]:
        """All that has met, in the order in which it goes; it is struck out."""
        found = []
        for line in self._met():
            mine, theirs = self._mine[line], self._theirs[line]
            while mine and theirs:
                found.append(Match(mine.popleft(), theirs.popleft()))
            for side in (self._mine, self._theirs):
                if not side[line]:
                    del side[line]
        return found
