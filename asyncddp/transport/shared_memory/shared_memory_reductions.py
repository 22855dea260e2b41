"""Allreduce and reduce-scatter among the ranks of one machine, through shared memory.

Every rank copies its pieces into slots of its own and publishes how many are there; the others
read and add them in place, in the order of the ranks, so that all get the same bits. A slot is
reused once all ranks have consumed its piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from asyncddp.shm.arena import MappedChunk, SharedMemoryHandle, handle_of_block, store_fence
from asyncddp.transport.base import SharedMemoryGroup

_MIN_BYTES = 1 << 16  # of a tensor; below, messages are quicker
_PIECE_BYTES = 1 << 20
_SLOTS = 3
_PUBLISHED, _REDUCED, _CONSUMED = 0, 8, 16  # progress words, each in a cache line of its own
_PUBLISH_AHEAD = 2  # pieces published before the first of them is reduced
_IDLE_POLLS = 100
_HEADER_BYTES = 3 * 64
_TOTAL_BYTES = _HEADER_BYTES + 2 * _SLOTS * _PIECE_BYTES
_Pieces: TypeAlias = Sequence[torch.Tensor]


class RankReductionBuffers:
    """One rank's shared-memory buffers: its progress counters, input pieces, and computed sums."""

    def __init__(self, view: MappedChunk, offset: int) -> None:
        self.words = view.words(offset, _HEADER_BYTES // 8)
        every = view.tensor(offset + _HEADER_BYTES, (2 * _SLOTS, _PIECE_BYTES), torch.uint8)
        slots = [every[number] for number in range(2 * _SLOTS)]
        self.slots, self.sums = slots[:_SLOTS], slots[_SLOTS:]


class SharedReductionBuffers:
    """Shared-memory buffers in which the ranks of a communicator reduce tensors.

    The ranks of ``group`` are numbered as in the communicator; ``gather`` is collective there.
    ``on_abandon`` is called when a reduction is abandoned.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        rank: int,
        gather: Callable[[SharedMemoryHandle], Sequence[SharedMemoryHandle]],
        on_abandon: Callable[[], None],
    ) -> None:
        handles = gather(handle_of_block(group.arena.take(_TOTAL_BYTES, zeroed=_HEADER_BYTES)))
        self.rank, self.on_abandon = rank, on_abandon
        self.rank_buffers = [
            RankReductionBuffers(group.arena.open(group.processes[peer], handle), handle.offset)
            for peer, handle in enumerate(handles)
        ]
        self.own = self.rank_buffers[rank]
        self.queue: deque[SharedMemoryReductionRequest] = deque()  # the first one has the slots
        self.piece_count = 0  # of all reductions so far

    @staticmethod
    def take(tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is reduced here, rather than by messages."""
        return tensor.nbytes >= _MIN_BYTES and tensor.dtype != torch.bool

    def minimum(self, word: int) -> int:
        """Return the least value of a progress word over all ranks."""
        minimum = min([rank.words[word] for rank in self.rank_buffers])
        store_fence()
        return minimum


class SharedMemoryReductionRequest(ABC):
    """Request of one reduction in shared memory; complete once all result pieces are in place."""

    def __init__(
        self,
        buffers: SharedReductionBuffers,
        tensor: torch.Tensor,
        out: torch.Tensor,
        divisor: int | None,
    ) -> None:
        self._buffers, self._divisor = buffers, divisor
        self._own, self._out = self._cut(tensor, out)
        self._first, self._pieces = buffers.piece_count, len(self._own)
        self._published = self._reduced = self._consumed = 0
        buffers.piece_count += self._pieces
        buffers.queue.append(self)

    def done(self) -> bool:
        """Progress the earlier reductions and this one; return True once this one is complete."""
        queue = self._buffers.queue
        while queue and queue[0]._progress():
            queue.popleft()
        return self._consumed == self._pieces

    def test(self) -> bool:
        """Do what :meth:`done` does."""
        return self.done()

    def abandon(self) -> None:
        """Abandon the reduction: no rank can complete it, nor any later one."""
        self._buffers.queue.clear()
        self._buffers.on_abandon()

    @abstractmethod
    def _cut(self, tensor: torch.Tensor, out: torch.Tensor) -> tuple[_Pieces, _Pieces]:
        """Cut this rank's term and the result into pieces."""

    @abstractmethod
    def _publish_piece(self, number: int) -> None:
        """Copy one of this rank's pieces into its slot."""

    @abstractmethod
    def _terms(self, number: int) -> list[torch.Tensor]:
        """Return all ranks' published terms of a piece, in the order of the ranks."""

    def _advance(self) -> bool:
        """Reduce one more piece into the result, if possible; return True if there was progress."""
        if not self._ready(_PUBLISHED, self._consumed):
            return False
        self._sum(self._terms(self._consumed), self._out[self._consumed])
        return self._finish_piece()

    def _progress(self) -> bool:
        idle_polls = 0
        while self._consumed < self._pieces and idle_polls < _IDLE_POLLS:
            published = self._publish_next()
            progressed = self._advance() or published
            idle_polls = 0 if progressed else idle_polls + 1
        return self._consumed == self._pieces

    def _publish_next(self) -> bool:
        """Copy this rank's next piece into its slot and publish it, if the slot is free."""
        number = self._published
        if number == self._pieces or number > self._consumed + _PUBLISH_AHEAD:
            return False
        if self._buffers.minimum(_CONSUMED) < self._first + number - _SLOTS + 1:
            return False
        self._publish_piece(number)
        self._published += 1
        self._announce(_PUBLISHED, self._published)
        return True

    def _finish_piece(self) -> bool:
        """Count one more result piece as in place, and announce it; always progress."""
        self._consumed += 1
        self._announce(_CONSUMED, self._consumed)
        return True

    def _announce(self, word: int, pieces: int) -> None:
        store_fence()
        self._buffers.own.words[word] = self._first + pieces

    def _ready(self, word: int, number: int) -> bool:
        """Return True if all ranks have announced a piece in a progress word."""
        return number < self._published and self._buffers.minimum(word) > self._first + number

    def _sum(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add the terms in the order of the ranks, and divide the sum."""
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if self._divisor is not None:
            out.div_(self._divisor)


class SharedMemoryAllreduceRequest(SharedMemoryReductionRequest):
    """Request of one allreduce through shared memory.

    Two ranks add each other's pieces in place; more of them divide the additions: rank r sums part
    r of each piece for all, which it need not publish, and every rank copies all parts.
    """

    def _cut(self, tensor: torch.Tensor, out: torch.Tensor) -> tuple[_Pieces, _Pieces]:
        step = _PIECE_BYTES // tensor.element_size()
        return torch.split(tensor.view(-1), step), torch.split(out.view(-1), step)

    def _slot(self, slots: list[torch.Tensor], number: int) -> torch.Tensor:
        slot = slots[(self._first + number) % _SLOTS]
        return slot[: self._own[number].nbytes].view(self._own[number].dtype)

    def _publish_piece(self, number: int) -> None:
        slot, own = self._slot(self._buffers.own.slots, number), self._own[number]
        if len(self._buffers.rank_buffers) == 2:
            slot.copy_(own)
            return
        first, end = self._part_range(own, self._buffers.rank)
        slot[:first].copy_(own[:first])
        slot[end:].copy_(own[end:])

    def _advance(self) -> bool:
        if len(self._buffers.rank_buffers) == 2:
            return super()._advance()
        added = self._reduce_part()
        return self._gather_parts() or added

    def _terms(self, number: int) -> list[torch.Tensor]:
        return [self._slot(rank.slots, number) for rank in self._buffers.rank_buffers]

    def _reduce_part(self) -> bool:
        """Sum this rank's part of one more piece for all ranks."""
        number, buffers = self._reduced, self._buffers
        if not self._ready(_PUBLISHED, number):
            return False
        parts = [self._rank_part(piece, buffers.rank) for piece in self._terms(number)]
        parts[buffers.rank] = self._rank_part(self._own[number], buffers.rank)
        if parts[0].numel():
            self._sum(parts, self._rank_part(self._slot(buffers.own.sums, number), buffers.rank))
        self._reduced += 1
        self._announce(_REDUCED, self._reduced)
        return True

    def _gather_parts(self) -> bool:
        """Copy all ranks' parts of one more piece into the result."""
        number = self._consumed
        if number >= self._reduced or not self._ready(_REDUCED, number):
            return False
        for rank, rank_buffer in enumerate(self._buffers.rank_buffers):
            part = self._rank_part(self._slot(rank_buffer.sums, number), rank)
            self._rank_part(self._out[number], rank).copy_(part)
        return self._finish_piece()

    def _rank_part(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a piece that a rank sums."""
        first, end = self._part_range(piece, rank)
        return piece[first:end]

    def _part_range(self, piece: torch.Tensor, rank: int) -> tuple[int, int]:
        share = -(-piece.numel() // len(self._buffers.rank_buffers))
        return rank * share, (rank + 1) * share


class SharedMemoryReduceScatterRequest(SharedMemoryReductionRequest):
    """Request of one reduce-scatter through shared memory.

    A piece is the same columns of all ranks' parts. Every rank publishes those of its rows that
    other ranks keep, and adds all ranks' rows that it keeps itself.
    """

    def _cut(self, tensor: torch.Tensor, out: torch.Tensor) -> tuple[_Pieces, _Pieces]:
        ranks = len(self._buffers.rank_buffers)
        step = _PIECE_BYTES // (ranks * tensor.element_size())
        columns = torch.split(tensor.view(ranks, -1), step, dim=1)
        return columns, torch.split(out.view(-1), step)

    def _slot(self, rank_buffer: RankReductionBuffers, number: int) -> torch.Tensor:
        """Return a rank's piece in its slot, with a row for each rank."""
        piece = self._own[number]
        slot = rank_buffer.slots[(self._first + number) % _SLOTS]
        return slot[: piece.nbytes].view(piece.dtype).view(piece.shape)

    def _publish_piece(self, number: int) -> None:
        rank, own = self._buffers.rank, self._own[number]
        slot = self._slot(self._buffers.own, number)
        slot[:rank].copy_(own[:rank])
        slot[rank + 1 :].copy_(own[rank + 1 :])

    def _terms(self, number: int) -> list[torch.Tensor]:
        rank, buffers = self._buffers.rank, self._buffers.rank_buffers
        terms = [self._slot(rank_buffer, number)[rank] for rank_buffer in buffers]
        terms[rank] = self._own[number][rank]
        return terms
