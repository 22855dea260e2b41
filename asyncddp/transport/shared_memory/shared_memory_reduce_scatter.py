"""Reduce-scatter among the ranks of one machine, through shared memory.

A piece is the same columns of all ranks' parts. Every rank publishes those of its rows that other
ranks keep, and adds, in the order of the ranks, all ranks' rows that it keeps itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncddp.transport.shared_memory.reduction_buffers import (
    PIECE_BYTES,
    PUBLISHED,
    SLOTS,
    RankReductionBuffers,
    SharedMemoryReduction,
    SharedReductionBuffers,
)


class SharedMemoryReduceScatter(SharedMemoryReduction):
    """Request of one reduce-scatter through shared memory.

    Args:
        buffers: The ranks' shared buffers.
        tensor: This rank's term: one part for each rank; contiguous, on the host.
        out: Receives this rank's part of the sum; not a part of ``tensor``.
        divisor: Divides the sum; None: no division.
        on_abandon: Called when the request is abandoned.
    """

    def __init__(
        self,
        buffers: SharedReductionBuffers,
        tensor: torch.Tensor,
        out: torch.Tensor,
        divisor: int | None,
        on_abandon: Callable[[], None],
    ) -> None:
        ranks = len(buffers.rank_buffers)
        step = PIECE_BYTES // (ranks * tensor.element_size())
        parts = tensor.view(ranks, -1)
        self._own = [parts[:, start : start + step] for start in range(0, parts.shape[1], step)]
        self._out = torch.split(out.view(-1), step)
        super().__init__(buffers, len(self._own), divisor, on_abandon)

    def _slot(self, rank_buffer: RankReductionBuffers, number: int) -> torch.Tensor:
        """Return a rank's piece in its slot, with a row for each rank."""
        piece = self._own[number]
        slot = rank_buffer.slots[(self._first + number) % SLOTS]
        return slot[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)

    def _publish_piece(self, number: int) -> None:
        rank, own = self._reduction_buffers.rank, self._own[number]
        slot = self._slot(self._reduction_buffers.own, number)
        slot[:rank].copy_(own[:rank])
        slot[rank + 1 :].copy_(own[rank + 1 :])

    def _advance(self) -> bool:
        number, buffers = self._consumed, self._reduction_buffers
        if not self._ready(PUBLISHED, number):
            return False
        terms = [
            self._slot(rank_buffer, number)[buffers.rank] for rank_buffer in buffers.rank_buffers
        ]
        terms[buffers.rank] = self._own[number][buffers.rank]
        self._sum(terms, self._out[number])
        self._finish_piece()
        return True
