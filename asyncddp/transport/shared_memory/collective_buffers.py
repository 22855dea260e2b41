"""Shared-memory buffers for collectives of large tensors between the ranks of one machine.

To reductions every rank copies its tensor, piece by piece, into slots of its own and publishes how
many are there; the others read them in place. A slot is reused once all ranks have consumed its
piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from asyncddp.shm.arena import MappedChunk, SharedMemoryHandle, handle_of_block, store_fence
from asyncddp.shm.peer_memory import read_peer_memory
from asyncddp.torch_modes import normal_mode
from asyncddp.transport.base import SharedMemoryGroup
from asyncddp.transport.shared_memory.group_formation import RecordGatherer, subgroup

PUBLISHED, REDUCED, CONSUMED = 0, 8, 16  # progress words, each in a cache line of its own
ADDRESS = 1  # word beside the first: where a tensor lies that others copy
MIN_BYTES = 1 << 16  # of a tensor; below, messages are quicker
_SLOTS = 3
_SLOT_BYTES = 1 << 20
_PIECE_SIZES = ((1 << 25, 1 << 20), (0, 1 << 19))
"""Least bytes of a tensor, and bytes of its pieces: they stay in a cache from write to read."""
_PUBLISH_AHEAD = 1  # pieces published beyond the one to consume
_IDLE_POLLS = 10
_PIECES_PER_ROUND = 16
_HEADER_BYTES = 3 * 64
_TEST_NUMBER = 0x41_44_44_50_43_4D_41
_TOTAL_BYTES = _HEADER_BYTES + 2 * _SLOTS * _SLOT_BYTES


def piece_bytes(nbytes: int) -> int:
    """Return the piece size for a tensor of so many bytes."""
    return next(piece for least, piece in _PIECE_SIZES if nbytes >= least)


class RankCollectiveBuffers:
    """Shared-memory buffers of one rank for collectives: progress counters, tensor pieces, sums."""

    def __init__(self, view: MappedChunk, offset: int) -> None:
        self.words = view.words(offset, _HEADER_BYTES // 8)
        every = view.tensor(offset + _HEADER_BYTES, (2, _SLOTS, _SLOT_BYTES), torch.uint8)
        self._memory = {torch.uint8: [[every[kind, n] for n in range(_SLOTS)] for kind in (0, 1)]}

    def slot(self, piece: int, dtype: torch.dtype, *, sums: bool = False) -> torch.Tensor:
        """Return the slot of a piece, or of its sum, as a flat tensor of a given dtype."""
        typed = self._memory.get(dtype)
        if typed is None:
            rows = self._memory[torch.uint8]
            with normal_mode():
                typed = self._memory[dtype] = [[one.view(dtype) for one in row] for row in rows]
        return typed[sums][piece % _SLOTS]


class SharedCollectiveBuffers:
    """Shared-memory buffers for the collectives of a communicator's ranks.

    The ranks of ``group`` are numbered as in the communicator; ``gather`` is collective there.
    ``on_abandon`` is called when a collective is abandoned.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        rank: int,
        gather: RecordGatherer,
        on_abandon: Callable[[], None],
    ) -> None:
        mine = handle_of_block(group.arena.take(_TOTAL_BYTES, zeroed=_HEADER_BYTES))
        handles = gather(mine, SharedMemoryHandle)
        self.rank, self.on_abandon = rank, on_abandon
        self.processes = [group.processes[peer] for peer in range(len(handles))]
        pairs = zip(self.processes, handles, strict=True)
        self.ranks = [
            RankCollectiveBuffers(group.arena.open(process, handle), handle.offset)
            for process, handle in pairs
        ]
        self.own = self.ranks[rank]
        self.reads_private_memory = self._try_reading(gather)
        """True if all ranks can read each other's private memory."""
        self.queue: deque[SharedMemoryCollectiveRequest] = deque()  # the first one has the slots
        self.piece_count = 0  # of all collectives so far

    @classmethod
    def open(
        cls,
        known: SharedMemoryGroup | None,
        members: Sequence[int],
        rank: int,
        gather: RecordGatherer,
        on_abandon: Callable[[], None],
    ) -> SharedCollectiveBuffers | None:
        """Open the buffers of ``members`` if they share memory; collective in that case."""
        group = subgroup(known, members)
        if group is None or len(members) < 2:
            return None
        return cls(group, members.index(rank), gather, on_abandon)

    @staticmethod
    def take(tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is reduced in shared memory, rather than by messages."""
        return tensor.nbytes >= MIN_BYTES and tensor.dtype != torch.bool

    def _try_reading(self, gather: RecordGatherer) -> bool:
        """Tell whether all ranks can read a number from each other's private memory; collective."""
        number = np.full(1, _TEST_NUMBER + self.rank)  # which lives until all ranks have read it
        addresses = gather(number.ctypes.data, int)
        able = gather(self._reads_numbers(addresses), bool)
        del number
        return all(able)

    def _reads_numbers(self, addresses: Sequence[int]) -> bool:
        found = np.zeros(1, dtype=np.int64)
        for peer, (process, address) in enumerate(zip(self.processes, addresses, strict=True)):
            try:
                read_peer_memory(process, address, found.ctypes.data, found.nbytes)
            except OSError:
                return False
            if found[0] != _TEST_NUMBER + peer:
                return False
        return True

    def minimum(self, word: int) -> int:
        """Return the smallest value of a progress word over all ranks."""
        minimum = min([rank.words[word] for rank in self.ranks])
        store_fence()
        return minimum


class SharedMemoryCollectiveRequest(ABC):
    """Base class of requests of one shared-memory collective, processed in pieces.

    All ranks count the same number of ``pieces``.
    """

    def __init__(self, buffers: SharedCollectiveBuffers, pieces: int) -> None:
        self._buffers, self._pieces = buffers, pieces
        self._first = buffers.piece_count
        self._published = self._consumed = 0
        buffers.piece_count += pieces
        buffers.queue.append(self)

    def done(self) -> bool:
        """Progress the earlier collectives and this one; return True once this one is complete."""
        queue = self._buffers.queue
        while queue and queue[0]._progress():
            queue.popleft()
        return self._is_complete()

    def test(self) -> bool:
        """Do the same as :meth:`done`."""
        return self.done()

    def _is_complete(self) -> bool:
        return self._consumed == self._pieces

    def abandon(self) -> None:
        """Abandon the collective; neither it nor later ones can complete on any rank."""
        self._buffers.queue.clear()
        self._buffers.on_abandon()

    @abstractmethod
    def _publish_next(self) -> bool:
        """Publish this rank's next piece, if possible; return True if it did."""

    @abstractmethod
    def _consume_piece(self, number: int) -> None:
        """Compute one piece of the result from the published pieces."""

    def _may_consume(self, number: int) -> bool:
        """Return True if all inputs of a piece of the result are published."""
        return self._all_announced(PUBLISHED, number)

    def _advance(self) -> bool:
        """Compute one more piece of the result if possible; return True on progress."""
        number = self._consumed
        if number >= self._published or not self._may_consume(number):
            return False
        self._consume_piece(number)
        self._consumed += 1
        self._announce(CONSUMED, self._consumed)
        return True

    def _progress(self) -> bool:
        idle_polls = moves = 0
        while (
            self._consumed < self._pieces and idle_polls < _IDLE_POLLS and moves < _PIECES_PER_ROUND
        ):
            published = self._publish_next()
            progressed = self._advance() or published
            idle_polls, moves = (0, moves + 1) if progressed else (idle_polls + 1, moves)
        return self._is_complete()

    def _announce(self, word: int, pieces: int) -> None:
        store_fence()
        self._buffers.own.words[word] = self._first + pieces

    def _all_announced(self, word: int, number: int) -> bool:
        """Return True if all ranks have announced a piece in a progress word."""
        return self._buffers.minimum(word) > self._first + number


class SlotCollectiveRequest(SharedMemoryCollectiveRequest):
    """Base class of requests of one collective, whose tensor is copied into buffers in pieces."""

    @abstractmethod
    def _publish_piece(self, number: int) -> None:
        """Copy one of this rank's pieces into its slot."""

    def _publish_next(self) -> bool:
        """Copy this rank's next piece into its slot and publish it, if the slot is free."""
        number = self._published
        if number == self._pieces or number > self._consumed + _PUBLISH_AHEAD:
            return False
        if self._buffers.minimum(CONSUMED) < self._first + number - _SLOTS + 1:
            return False
        self._publish_piece(number)
        self._published += 1
        self._announce(PUBLISHED, self._published)
        return True

    def _slot(
        self, rank: int, like: torch.Tensor, number: int, *, sums: bool = False
    ) -> torch.Tensor:
        """Return the part of a rank's slot, or of its sum's, for a piece of this size."""
        buffers = self._buffers.ranks[rank]
        slot = buffers.slot(self._first + number, like.dtype, sums=sums)
        count = like.numel()
        return slot if slot.numel() == count else slot[:count]
