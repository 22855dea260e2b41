"""Where the ranks of one machine form sums, piece by piece: slots in memory that all of them see.

Every rank copies its pieces into slots of its own and says how far it has come; the others add
them where they lie. A slot is used again once all ranks have taken what was in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch

from asyncddp.memory.shared import Place, View, fence, place_of
from asyncddp.transport.contract import Neighborhood

__all__ = ["ADDED", "LEAST", "PIECE", "SHOWN", "SLOTS", "Board", "Reduction", "Side"]

LEAST = 1 << 16  # bytes below which a message is quicker
PIECE = 1 << 19
SLOTS = 4
SHOWN, ADDED, TAKEN = 0, 8, 16  # words, each in a line of its own
_AHEAD = 2  # pieces that are shown before the first of them is added
_LOOKS = 100
_HEADER = 3 * 64
_SIZE = _HEADER + 2 * SLOTS * PIECE


class Side:
    """One rank's part of a board: how far it has come, its pieces, and sums that it has formed."""

    def __init__(self, view: View, offset: int) -> None:
        self.words = view.words(offset, _HEADER // 8)
        start = offset + _HEADER
        slots = [
            view.tensor(start + number * PIECE, (PIECE,), torch.uint8)
            for number in range(2 * SLOTS)
        ]
        self.slots, self.sums = slots[:SLOTS], slots[SLOTS:]


class Board:
    """Where the ranks of a communicator form sums; none if it cannot be had.

    Args:
        near: The ranks, numbered as in the communicator, and how they see each other's memory.
        rank: This rank.
        gather: Gives what all ranks of the communicator put in, in their order; collective.

    Raises:
        OSError: There is no more memory, or a peer's cannot be seen.
    """

    def __init__(
        self, near: Neighborhood, rank: int, gather: Callable[[Place], Sequence[Place]]
    ) -> None:
        places = gather(place_of(near.arena.take(_SIZE, zeroed=_HEADER)))
        self.rank = rank
        self.sides = [
            Side(near.arena.open(near.processes[peer], place), place.offset)
            for peer, place in enumerate(places)
        ]
        self.mine = self.sides[rank]
        self.line: deque[Reduction] = deque()
        """What is under way; the slots are the first one's until that has ended."""
        self.count = 0
        """Pieces of all sums so far."""

    def least(self, word: int) -> int:
        """The least value of a word among all ranks."""
        least = min([side.words[word] for side in self.sides])
        fence()
        return least


class Reduction(ABC):
    """One reduction under way on a board; done once all pieces are in place.

    Args:
        board: Where.
        pieces: How many there are, the same on all ranks.
        divisor: By which sums are divided, or None.
        give_up: Called when it is abandoned.
    """

    def __init__(
        self, board: Board, pieces: int, divisor: int | None, give_up: Callable[[], None]
    ) -> None:
        self._board, self._pieces, self._divisor = board, pieces, divisor
        self._give_up = give_up
        self._first = board.count
        self._shown = self._taken = 0
        board.count += pieces
        board.line.append(self)

    def done(self) -> bool:
        """Go on as far as possible, after all that came before it; whether all is in place."""
        line = self._board.line
        while line and line[0]._move():
            line.popleft()
        return self._taken == self._pieces

    def abandon(self) -> None:
        """Give it up: the others can never end it, nor what comes after it."""
        self._board.line.clear()
        self._give_up()

    @abstractmethod
    def _fill(self, number: int) -> None:
        """Copy a piece of this rank's into its slot."""

    @abstractmethod
    def _advance(self) -> bool:
        """Form or take what can be formed or taken of one more piece; whether there was any."""

    def _move(self) -> bool:
        looks = 0
        while self._taken < self._pieces and looks < _LOOKS:
            moved = self._show()
            moved = self._advance() or moved
            looks = 0 if moved else looks + 1
        return self._taken == self._pieces

    def _show(self) -> bool:
        """Copy one more of our pieces to where all see it."""
        number = self._shown
        if number == self._pieces or number > self._taken + _AHEAD:
            return False
        if self._board.least(TAKEN) < self._first + number - SLOTS + 1:
            return False
        self._fill(number)
        self._shown += 1
        self._tell(SHOWN, self._shown)
        return True

    def _took(self) -> None:
        """One more piece is in place."""
        self._taken += 1
        self._tell(TAKEN, self._taken)

    def _tell(self, word: int, pieces: int) -> None:
        """Say how far this rank has come."""
        fence()
        self._board.mine.words[word] = self._first + pieces

    def _ready(self, word: int, number: int) -> bool:
        """Whether all ranks have come so far with a piece."""
        return number < self._shown and self._board.least(word) > self._first + number

    def _sum(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add in the order of the ranks, and divide."""
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if self._divisor is not None:
            out.div_(self._divisor)
