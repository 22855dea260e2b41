"""Allreduce among the ranks of one machine, through shared memory.

Two ranks add each other's pieces in place; more of them divide the additions: rank r sums part r
of each piece for all, and every rank copies all parts. Terms are added in the order of the ranks,
so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncddp.transport.shared_memory.reduction_buffers import (
    PIECE_BYTES,
    PUBLISHED,
    REDUCED,
    SLOTS,
    SharedMemoryReduction,
    SharedReductionBuffers,
)


class SharedMemoryAllreduce(SharedMemoryReduction):
    """Request of one allreduce through shared memory.

    Args:
        buffers: The ranks' shared buffers.
        tensor: This rank's term, contiguous, on the host.
        out: Receives the sum; may be ``tensor``.
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
        step = PIECE_BYTES // tensor.element_size()
        self._dtype = tensor.dtype
        self._own = torch.split(tensor.view(-1), step)
        self._out = torch.split(out.view(-1), step)
        self._reduced = 0
        super().__init__(buffers, len(self._own), divisor, on_abandon)

    def _slot(self, slots: list[torch.Tensor], number: int) -> torch.Tensor:
        piece = self._own[number]
        slot = slots[(self._first + number) % SLOTS]
        return slot[: piece.nbytes].view(self._dtype)

    def _publish_piece(self, number: int) -> None:
        self._slot(self._reduction_buffers.own.slots, number).copy_(self._own[number])

    def _advance(self) -> bool:
        if len(self._reduction_buffers.rank_buffers) == 2:
            return self._reduce_pair()
        added = self._reduce_part()
        return self._gather_parts() or added

    def _reduce_pair(self) -> bool:
        """Add both ranks' pieces into the result."""
        number = self._consumed
        if not self._ready(PUBLISHED, number):
            return False
        self._sum(
            [self._slot(s.slots, number) for s in self._reduction_buffers.rank_buffers],
            self._out[number],
        )
        self._finish_piece()
        return True

    def _reduce_part(self) -> bool:
        """Sum this rank's part of one more piece for all ranks."""
        number, buffers = self._reduced, self._reduction_buffers
        if not self._ready(PUBLISHED, number):
            return False
        parts = [
            self._rank_part(self._slot(s.slots, number), buffers.rank) for s in buffers.rank_buffers
        ]
        if parts[0].numel():
            self._sum(parts, self._rank_part(self._slot(buffers.own.sums, number), buffers.rank))
        self._reduced += 1
        self._announce(REDUCED, self._reduced)
        return True

    def _gather_parts(self) -> bool:
        """Copy all ranks' parts of one more piece into the result."""
        number = self._consumed
        if number >= self._reduced or not self._ready(REDUCED, number):
            return False
        for rank, rank_buffer in enumerate(self._reduction_buffers.rank_buffers):
            part = self._rank_part(self._slot(rank_buffer.sums, number), rank)
            self._rank_part(self._out[number], rank).copy_(part)
        self._finish_piece()
        return True

    def _rank_part(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a piece that a rank sums."""
        share = -(-piece.numel() // len(self._reduction_buffers.rank_buffers))
        return piece[rank * share : (rank + 1) * share]
