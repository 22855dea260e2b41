"""The part of a sum that each rank of a machine keeps, through memory that all of them see.

A piece is the same columns of all ranks' parts. Every rank shows what the others keep of its
piece, and adds, in the order of the ranks, what it keeps itself of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncddp.transport.shared_board import PIECE, SHOWN, SLOTS, Board, Reduction, Side

__all__ = ["SharedReduceScatter"]


class SharedReduceScatter(Reduction):
    """One ``reduce_scatter`` under way.

    Args:
        board: Where.
        tensor: What this rank adds: a part for each rank; contiguous, on the host.
        out: Where this rank's part of the sum goes; no part of ``tensor``.
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
        ranks = len(board.sides)
        step = PIECE // (ranks * tensor.element_size())
        parts = tensor.view(ranks, -1)
        self._own = [parts[:, start : start + step] for start in range(0, parts.shape[1], step)]
        self._out = torch.split(out.view(-1), step)
        super().__init__(board, len(self._own), divisor, give_up)

    def _slot(self, side: Side, number: int) -> torch.Tensor:
        """A rank's piece, as ranks times columns."""
        piece = self._own[number]
        slot = side.slots[(self._first + number) % SLOTS]
        return slot[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)

    def _fill(self, number: int) -> None:
        rank, own = self._board.rank, self._own[number]
        slot = self._slot(self._board.mine, number)
        slot[:rank].copy_(own[:rank])
        slot[rank + 1 :].copy_(own[rank + 1 :])

    def _advance(self) -> bool:
        number, board = self._taken, self._board
        if not self._ready(SHOWN, number):
            return False
        terms = [self._slot(side, number)[board.rank] for side in board.sides]
        terms[board.rank] = self._own[number][board.rank]
        self._sum(terms, self._out[number])
        self._took()
        return True
