"""Allgather and broadcast among the ranks of one machine, which read each other's private memory.

A rank publishes where its tensor lies, and is done once all others have read it there, in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.errors import PeerError
from asyncddp.shm.arena import full_memory_fence
from asyncddp.shm.peer_memory import read_peer_memory
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.shared_memory.collective_buffers import (
    ADDRESS,
    CONSUMED,
    PUBLISHED,
    SharedCollectiveBuffers,
    SharedMemoryCollectiveRequest,
)

_PIECE_BYTES = 1 << 22  # bytes that are read at once


class SharedMemoryCopyRequest(SharedMemoryCollectiveRequest):
    """Request in which some ranks, the ``sources``, give tensors that others copy.

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
        """Copy bytes of a rank's tensor, which it must not have given up meanwhile."""
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
        """Abandon the collective, and let no rank read this one's tensor any more."""
        self._buffers.own.words[ADDRESS] = 0
        super().abandon()


def allgather_request(
    buffers: SharedCollectiveBuffers,
    tensor: torch.Tensor,
    out: torch.Tensor,
    counts: Sequence[int],
) -> SharedMemoryCopyRequest:
    """Start an allgather of so many elements of each rank."""
    sizes = [count * out.element_size() for count in counts]
    parts = torch.split(as_bytes(out), sizes)
    return SharedMemoryCopyRequest(buffers, as_bytes(tensor), range(len(counts)), parts)


def broadcast_request(
    buffers: SharedCollectiveBuffers, tensor: torch.Tensor, root: int
) -> SharedMemoryCopyRequest:
    """Start a broadcast."""
    flat = as_bytes(tensor)
    return SharedMemoryCopyRequest(buffers, flat, [root], [flat])
