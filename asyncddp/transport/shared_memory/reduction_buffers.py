"""Buffers in shared memory in which the ranks of one machine reduce tensors, piece by piece.

Every rank copies its pieces into slots of its own and publishes how many are there; the others
read and add them in place. A slot is reused once all ranks have consumed its piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch

from asyncddp.shm.arena import MappedChunk, SharedMemoryHandle, handle_of_block, store_fence
from asyncddp.transport.base import SharedMemoryGroup

MIN_BYTES = 1 << 16  # of a tensor; below, MPI is quicker
PIECE_BYTES = 1 << 19
SLOTS = 4
PUBLISHED, REDUCED, CONSUMED = 0, 8, 16  # progress words, each in a cache line of its own
_PUBLISH_AHEAD = 2  # pieces published before the first of them is reduced
_IDLE_POLLS = 100
_HEADER_BYTES = 3 * 64
_TOTAL_BYTES = _HEADER_BYTES + 2 * SLOTS * PIECE_BYTES


class RankReductionBuffers:
    """One rank's shared-memory buffers: its progress counters, input pieces, and computed sums."""

    def __init__(self, view: MappedChunk, offset: int) -> None:
        self.words = view.words(offset, _HEADER_BYTES // 8)
        start = offset + _HEADER_BYTES
        slots = [
            view.tensor(start + number * PIECE_BYTES, (PIECE_BYTES,), torch.uint8)
            for number in range(2 * SLOTS)
        ]
        self.slots, self.sums = slots[:SLOTS], slots[SLOTS:]


class SharedReductionBuffers:
    """Shared-memory buffers in which the ranks of a communicator reduce tensors.

    Args:
        group: The ranks, numbered as in the communicator, and their mapped memory.
        rank: This rank.
        gather: Gathers one record from every rank of the communicator; collective.

    Raises:
        OSError: There is no more memory, or a peer's cannot be mapped.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        rank: int,
        gather: Callable[[SharedMemoryHandle], Sequence[SharedMemoryHandle]],
    ) -> None:
        handles = gather(handle_of_block(group.arena.take(_TOTAL_BYTES, zeroed=_HEADER_BYTES)))
        self.rank = rank
        self.rank_buffers = [
            RankReductionBuffers(group.arena.open(group.processes[peer], handle), handle.offset)
            for peer, handle in enumerate(handles)
        ]
        self.own = self.rank_buffers[rank]
        self.queue: deque[SharedMemoryReduction] = deque()
        """Reductions in progress; the first one has the slots until it completes."""
        self.piece_count = 0
        """Number of pieces of all reductions so far."""

    def minimum(self, word: int) -> int:
        """Return the least value of a progress word over all ranks."""
        minimum = min([rank_buffer.words[word] for rank_buffer in self.rank_buffers])
        store_fence()
        return minimum


class SharedMemoryReduction(ABC):
    """Request of one reduction in shared memory; complete once all result pieces are in place.

    Args:
        buffers: The ranks' shared buffers.
        pieces: Number of pieces, the same on all ranks.
        divisor: Divides the sums; None: no division.
        on_abandon: Called when the request is abandoned.
    """

    def __init__(
        self,
        buffers: SharedReductionBuffers,
        pieces: int,
        divisor: int | None,
        on_abandon: Callable[[], None],
    ) -> None:
        self._reduction_buffers, self._pieces, self._divisor = buffers, pieces, divisor
        self._on_abandon = on_abandon
        self._first = buffers.piece_count
        self._published = self._consumed = 0
        buffers.piece_count += pieces
        buffers.queue.append(self)

    def done(self) -> bool:
        """Progress the earlier reductions and this one; return True once this one is complete."""
        queue = self._reduction_buffers.queue
        while queue and queue[0]._progress():
            queue.popleft()
        return self._consumed == self._pieces

    def abandon(self) -> None:
        """Abandon the reduction: no rank can complete it, nor any later one."""
        self._reduction_buffers.queue.clear()
        self._on_abandon()

    @abstractmethod
    def _publish_piece(self, number: int) -> None:
        """Copy one of this rank's pieces into its slot."""

    @abstractmethod
    def _advance(self) -> bool:
        """Reduce or consume one more piece, if possible; return True if there was progress."""

    def _progress(self) -> bool:
        idle_polls = 0
        while self._consumed < self._pieces and idle_polls < _IDLE_POLLS:
            progressed = self._publish_next()
            progressed = self._advance() or progressed
            idle_polls = 0 if progressed else idle_polls + 1
        return self._consumed == self._pieces

    def _publish_next(self) -> bool:
        """Copy this rank's next piece into its slot and publish it, if the slot is free."""
        number = self._published
        if number == self._pieces or number > self._consumed + _PUBLISH_AHEAD:
            return False
        if self._reduction_buffers.minimum(CONSUMED) < self._first + number - SLOTS + 1:
            return False
        self._publish_piece(number)
        self._published += 1
        self._announce(PUBLISHED, self._published)
        return True

    def _finish_piece(self) -> None:
        """Count one more result piece as in place, and announce it."""
        self._consumed += 1
        self._announce(CONSUMED, self._consumed)

    def _announce(self, word: int, pieces: int) -> None:
        """Publish this rank's progress in one of its words."""
        store_fence()
        self._reduction_buffers.own.words[word] = self._first + pieces

    def _ready(self, word: int, number: int) -> bool:
        """Return True if all ranks have announced a piece in a progress word."""
        return (
            number < self._published
            and self._reduction_buffers.minimum(word) > self._first + number
        )

    def _sum(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add the terms in the order of the ranks, and divide the sum."""
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if self._divisor is not None:
            out.div_(self._divisor)
