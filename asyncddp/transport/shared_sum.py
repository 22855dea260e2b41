"""Sums over the ranks of one machine, piece by piece, through memory that all of them see.

Every rank copies its pieces into slots. Two ranks then add each other's where they lie; more of
them share the adding: rank r forms part r of each piece for all, and everybody takes all parts.
Terms are added in the order of the ranks, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncddp.memory.shared import Place, View, fence
from asyncddp.transport.contract import Neighborhood

__all__ = ["LEAST", "Board", "SharedSum"]

LEAST = 1 << 16  # bytes below which a message is quicker
_PIECE = 1 << 19
_SLOTS = 4
_AHEAD = 2  # pieces that are shown before the first of them is added
_LOOKS = 100
_SHOWN, _ADDED, _TAKEN = 0, 8, 16  # words, each in a line of its own
_HEADER = 3 * 64
_SIZE = _HEADER + 2 * _SLOTS * _PIECE


class _Side:
    """One rank's part of a board."""

    def __init__(self, view: View, offset: int) -> None:
        self.words = view.words(offset, _HEADER // 8)
        start = offset + _HEADER
        slots = [
            view.tensor(start + number * _PIECE, (_PIECE,), torch.uint8)
            for number in range(2 * _SLOTS)
        ]
        self.slots, self.sums = slots[:_SLOTS], slots[_SLOTS:]


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
        chunk, offset = near.arena.reserve(_SIZE)
        places = gather(Place(chunk.descriptor, chunk.size, offset))
        self.rank = rank
        self.sides = [
            _Side(near.arena.open(near.processes[peer], place), place.offset)
            for peer, place in enumerate(places)
        ]
        self.mine = self.sides[rank]
        self.count = 0
        """Pieces of all sums so far."""

    def least(self, word: int) -> int:
        """The least value of a word among all ranks."""
        least = min([side.words[word] for side in self.sides])
        fence()
        return least


class SharedSum:
    """One sum under way; done once all pieces are in place.

    Args:
        board: Where.
        tensor: What this rank adds, contiguous, on the host.
        out: Where the sum goes; may be ``tensor``.
        divisor: By which the sum is divided, or None.
        give_up: Called when it is abandoned.
    """

    def __init__(
        self,
        board: Board,
        tensor: torch.Tensor,
        out: torch.Tensor,
        divisor: int | None,
        give_up: Callable[[], None],
    ) -> None:
        step = _PIECE // tensor.element_size()
        self._board, self._divisor, self._give_up = board, divisor, give_up
        self._dtype = tensor.dtype
        self._own = torch.split(tensor.view(-1), step)
        self._out = torch.split(out.view(-1), step)
        self._first = board.count
        board.count += len(self._own)
        self._shown = self._added = self._taken = 0

    def done(self) -> bool:
        """Go on as far as possible; whether all is in place."""
        looks = 0
        while self._taken < len(self._own) and looks < _LOOKS:
            moved = self._show()
            if len(self._board.sides) > 2:
                moved = self._add() or moved
                moved = self._take() or moved
            else:
                moved = self._add_here() or moved
            looks = 0 if moved else looks + 1
        return self._taken == len(self._own)

    def abandon(self) -> None:
        """Give it up: the others can never end it."""
        self._give_up()

    def _slot(self, slots: list[torch.Tensor], number: int) -> torch.Tensor:
        piece = self._own[number]
        slot = slots[(self._first + number) % _SLOTS]
        return slot[: piece.nbytes].view(self._dtype)

    def _show(self) -> bool:
        """Copy one more of our pieces to where all see it."""
        number, board = self._shown, self._board
        if number == len(self._own) or number > self._taken + _AHEAD:
            return False
        if board.least(_TAKEN) < self._first + number - _SLOTS + 1:
            return False
        self._slot(board.mine.slots, number).copy_(self._own[number])
        self._shown += 1
        fence()
        board.mine.words[_SHOWN] = self._first + self._shown
        return True

    def _ready(self, word: int, number: int) -> bool:
        """Whether all ranks have come so far with a piece."""
        return number < self._shown and self._board.least(word) > self._first + number

    def _add_here(self) -> bool:
        """Add both ranks' pieces into place."""
        number = self._taken
        if not self._ready(_SHOWN, number):
            return False
        self._sum([self._slot(s.slots, number) for s in self._board.sides], self._out[number])
        self._taken += 1
        fence()
        self._board.mine.words[_TAKEN] = self._first + self._taken
        return True

    def _add(self) -> bool:
        """Form our part of one more piece for all."""
        number, board = self._added, self._board
        if not self._ready(_SHOWN, number):
            return False
        parts = [self._part(self._slot(s.slots, number), board.rank) for s in board.sides]
        if parts[0].numel():
            self._sum(parts, self._part(self._slot(board.mine.sums, number), board.rank))
        self._added += 1
        fence()
        board.mine.words[_ADDED] = self._first + self._added
        return True

    def _take(self) -> bool:
        """Put the parts of one more piece into place."""
        number, board = self._taken, self._board
        if number >= self._added or not self._ready(_ADDED, number):
            return False
        for rank, side in enumerate(board.sides):
            part = self._part(self._slot(side.sums, number), rank)
            self._part(self._out[number], rank).copy_(part)
        self._taken += 1
        fence()
        board.mine.words[_TAKEN] = self._first + self._taken
        return True

    def _part(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a piece that a rank adds."""
        share = -(-piece.numel() // len(self._board.sides))
        return piece[rank * share : (rank + 1) * share]

    def _sum(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if self._divisor is not None:
            out.div_(self._divisor)
