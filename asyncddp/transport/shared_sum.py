"""Sums over the ranks of one machine, through memory that all of them see.

Two ranks add each other's pieces where they lie; more of them share the adding: rank r forms part
r of each piece for all, and everybody takes all parts. Terms are added in the order of the ranks,
so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncddp.transport.shared_board import ADDED, PIECE, SHOWN, SLOTS, Board, Reduction

__all__ = ["SharedSum"]


class SharedSum(Reduction):
    """One sum under way.

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
        step = PIECE // tensor.element_size()
        self._dtype = tensor.dtype
        self._own = torch.split(tensor.view(-1), step)
        self._out = torch.split(out.view(-1), step)
        self._added = 0
        super().__init__(board, len(self._own), divisor, give_up)

    def _slot(self, slots: list[torch.Tensor], number: int) -> torch.Tensor:
        piece = self._own[number]
        slot = slots[(self._first + number) % SLOTS]
        return slot[: piece.nbytes].view(self._dtype)

    def _fill(self, number: int) -> None:
        self._slot(self._board.mine.slots, number).copy_(self._own[number])

    def _advance(self) -> bool:
        if len(self._board.sides) == 2:
            return self._add_here()
        added = self._add()
        return self._take() or added

    def _add_here(self) -> bool:
        """Add both ranks' pieces into place."""
        number = self._taken
        if not self._ready(SHOWN, number):
            return False
        self._sum([self._slot(s.slots, number) for s in self._board.sides], self._out[number])
        self._took()
        return True

    def _add(self) -> bool:
        """Form our part of one more piece for all."""
        number, board = self._added, self._board
        if not self._ready(SHOWN, number):
            return False
        parts = [self._part(self._slot(s.slots, number), board.rank) for s in board.sides]
        if parts[0].numel():
            self._sum(parts, self._part(self._slot(board.mine.sums, number), board.rank))
        self._added += 1
        self._tell(ADDED, self._added)
        return True

    def _take(self) -> bool:
        """Put the parts of one more piece into place."""
        number = self._taken
        if number >= self._added or not self._ready(ADDED, number):
            return False
        for rank, side in enumerate(self._board.sides):
            part = self._part(self._slot(side.sums, number), rank)
            self._part(self._out[number], rank).copy_(part)
        self._took()
        return True

    def _part(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a piece that a rank adds."""
        share = -(-piece.numel() // len(self._board.sides))
        return piece[rank * share : (rank + 1) * share]
