"""Requests of collectives among the ranks of one machine, through shared memory.

For copies a rank publishes where its tensor lies, and is done once all others have read it there,
in one copy. For sums terms are added in the order of the ranks, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.errors import PeerError
from asyncddp.shm.arena import full_memory_fence
from asyncddp.shm.peer_memory import read_peer_memory
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.means import sum_of
from asyncddp.transport.shared_memory.collective_buffers import (
    ADDRESS,
    CONSUMED,
    PUBLISHED,
    REDUCED,
    SharedCollectiveBuffers,
    SharedMemoryCollectiveRequest,
    SlotCollectiveRequest,
    piece_bytes,
)

_PIECE_BYTES = 1 << 22  # bytes that are read at once


class SharedMemoryCopyRequest(SharedMemoryCollectiveRequest):
    """Request of a broadcast or allgather through shared memory, from the ranks ``sources``.

    ``parts`` get their bytes, where this rank does not give them itself.
    """

    def __init__(
        self,
        buffers: SharedCollectiveBuffers,
        tensor: torch.Tensor,
        sources: Iterable[int],
        parts: Sequence[torch.Tensor],
    ) -> None:
        self._tensor, self._sources = tensor, [*sources]
        self._gives = buffers.rank in self._sources
        self._parts = list(zip(self._sources, parts, strict=True))
        longest = max(part.nbytes for part in parts)
        super().__init__(buffers, max(1, -(-longest // _PIECE_BYTES)))

    def _publish_next(self) -> bool:
        if self._published:
            return False
        if self._gives:
            self._buffers.own.words[ADDRESS] = self._tensor.data_ptr()
        self._published = self._pieces
        self._announce(PUBLISHED, self._published)
        return True

    def _may_consume(self, number: int) -> bool:
        ranks, needed = self._buffers.ranks, self._first + number
        return all([ranks[source].words[PUBLISHED] > needed for source in self._sources])

    def _consume_piece(self, number: int) -> None:
        start = number * _PIECE_BYTES
        for source, part in self._parts:
            size = min(_PIECE_BYTES, part.nbytes - start)
            if size > 0 and source != self._buffers.rank:
                self._read(source, start, part[start : start + size])
            elif size > 0 and part.data_ptr() != self._tensor.data_ptr():
                part[start : start + size].copy_(self._tensor[start : start + size])

    def _read(self, source: int, start: int, into: torch.Tensor) -> None:
        """Copy bytes of a rank's tensor; raise if that rank abandons the collective."""
        full_memory_fence()
        words, process = self._buffers.ranks[source].words, self._buffers.processes[source]
        address, problem = words[ADDRESS], "it has given the collective up"
        try:
            if address:
                read_peer_memory(process, address + start, into.data_ptr(), into.nbytes)
                full_memory_fence()
        except OSError as error:
            problem = str(error)
            address = 0
        if not address or words[ADDRESS] != address:
            raise PeerError(f"the tensor of rank {source} cannot be read: {problem}")

    def _is_complete(self) -> bool:
        if not super()._is_complete():
            return False
        return not self._gives or self._buffers.minimum(CONSUMED) >= self._first + self._pieces

    def abandon(self) -> None:
        """Abandon the collective, and stop other ranks from reading this rank's tensor."""
        self._buffers.own.words[ADDRESS] = 0
        super().abandon()


def allgather_request(
    buffers: SharedCollectiveBuffers,
    tensor: torch.Tensor,
    out: torch.Tensor,
    counts: Sequence[int],
) -> SharedMemoryCopyRequest:
    """Start an allgather of ``counts[r]`` elements from each rank r."""
    sizes = [count * out.element_size() for count in counts]
    parts = torch.split(as_bytes(out), sizes)
    return SharedMemoryCopyRequest(buffers, as_bytes(tensor), range(len(counts)), parts)


def broadcast_request(
    buffers: SharedCollectiveBuffers, tensor: torch.Tensor, root: int
) -> SharedMemoryCopyRequest:
    """Start a broadcast."""
    flat = as_bytes(tensor)
    return SharedMemoryCopyRequest(buffers, flat, [root], [flat])


class SharedMemoryAllreduceRequest(SlotCollectiveRequest):
    """Request of one allreduce between two ranks, which add each other's pieces in place."""

    def __init__(
        self,
        buffers: SharedCollectiveBuffers,
        tensor: torch.Tensor,
        out: torch.Tensor,
        divisor: int | None,
    ) -> None:
        step = piece_bytes(tensor.nbytes) // tensor.element_size()
        self._own, self._out = torch.split(tensor.view(-1), step), torch.split(out.view(-1), step)
        self._divisor = divisor
        super().__init__(buffers, len(self._own))

    def _publish_piece(self, number: int) -> None:
        own = self._own[number]
        self._slot(self._buffers.rank, own, number).copy_(own)

    def _consume_piece(self, number: int) -> None:
        own, rank = self._own[number], self._buffers.rank
        terms = [own, self._slot(1 - rank, own, number)]
        sum_of(terms if rank == 0 else terms[::-1], self._divisor, self._out[number])


class SharedMemoryPartwiseAllreduceRequest(SharedMemoryAllreduceRequest):
    """Request of one allreduce between three or more ranks, each of which sums a part.

    Rank r sums part r of each piece for all, which it need not publish, and every rank copies all
    parts.
    """

    _reduced = 0

    def _publish_piece(self, number: int) -> None:
        own, rank = self._own[number], self._buffers.rank
        slot, (first, end) = self._slot(rank, own, number), self._part_range(own, rank)
        slot[:first].copy_(own[:first])
        slot[end:].copy_(own[end:])

    def _advance(self) -> bool:
        added = self._reduce_part()
        return super()._advance() or added

    def _may_consume(self, number: int) -> bool:
        return number < self._reduced and self._all_announced(REDUCED, number)

    def _reduce_part(self) -> bool:
        """Sum this rank's part of one more piece for all ranks, if all have published it."""
        number, rank = self._reduced, self._buffers.rank
        if number >= self._published or not self._all_announced(PUBLISHED, number):
            return False
        own = self._own[number]
        every = [self._slot(peer, own, number) for peer in range(len(self._buffers.ranks))]
        every[rank] = own
        parts = [self._rank_part(piece, rank) for piece in every]
        if parts[0].numel():
            total = self._rank_part(self._slot(rank, own, number, sums=True), rank)
            sum_of(parts, self._divisor, total)
        self._reduced += 1
        self._announce(REDUCED, self._reduced)
        return True

    def _consume_piece(self, number: int) -> None:
        own, out = self._own[number], self._out[number]
        for rank in range(len(self._buffers.ranks)):
            total = self._slot(rank, own, number, sums=True)
            self._rank_part(out, rank).copy_(self._rank_part(total, rank))

    def _rank_part(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a piece that a rank sums."""
        first, end = self._part_range(piece, rank)
        return piece[first:end]

    def _part_range(self, piece: torch.Tensor, rank: int) -> tuple[int, int]:
        share = -(-piece.numel() // len(self._buffers.ranks))
        return rank * share, (rank + 1) * share


class SharedMemoryReduceScatterRequest(SlotCollectiveRequest):
    """Request of one reduce-scatter through shared memory.

    A piece is the same columns of all ranks' parts. Every rank publishes those of its rows that
    other ranks keep, and adds all ranks' rows that it keeps itself.
    """

    def __init__(
        self,
        buffers: SharedCollectiveBuffers,
        tensor: torch.Tensor,
        out: torch.Tensor,
        divisor: int | None,
    ) -> None:
        ranks = len(buffers.ranks)
        step = piece_bytes(tensor.nbytes) // (ranks * tensor.element_size())
        self._own = torch.split(tensor.view(ranks, -1), step, dim=1)
        self._out, self._divisor = torch.split(out.view(-1), step), divisor
        super().__init__(buffers, len(self._own))

    def _publish_piece(self, number: int) -> None:
        rank, own = self._buffers.rank, self._own[number]
        slot = self._slot(rank, own, number).view(own.shape)
        for peer in range(len(self._buffers.ranks)):
            if peer != rank:
                slot[peer].copy_(own[peer])

    def _consume_piece(self, number: int) -> None:
        rank, own = self._buffers.rank, self._own[number]
        terms = [
            own[rank] if peer == rank else self._slot(peer, own, number).view(own.shape)[rank]
            for peer in range(len(self._buffers.ranks))
        ]
        sum_of(terms, self._divisor, self._out[number])


def allreduce_request(
    buffers: SharedCollectiveBuffers,
    tensor: torch.Tensor,
    out: torch.Tensor,
    divisor: int | None,
) -> SharedMemoryAllreduceRequest:
    """Start an allreduce."""
    two = len(buffers.ranks) == 2
    request = SharedMemoryAllreduceRequest if two else SharedMemoryPartwiseAllreduceRequest
    return request(buffers, tensor, out, divisor)
