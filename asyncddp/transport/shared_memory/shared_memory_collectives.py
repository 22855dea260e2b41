"""Collectives of large tensors among ranks that share memory, for the transports of such ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.transport.base import Request, Transport
from asyncddp.transport.shared_memory.collective_buffers import MIN_BYTES, SharedCollectiveBuffers
from asyncddp.transport.shared_memory.shared_memory_copies import (
    allgather_request,
    broadcast_request,
)
from asyncddp.transport.shared_memory.shared_memory_reductions import (
    SharedMemoryAllreduceRequest,
    SharedMemoryPartwiseAllreduceRequest,
    SharedMemoryReduceScatterRequest,
)


class SharedMemoryCollectives:
    """Collectives of a transport's ranks through shared memory.

    The methods are those of :class:`~asyncddp.transport.base.Transport`; they return None where
    messages are quicker, on all ranks alike.
    """

    def __init__(self, transport: Transport, buffers: SharedCollectiveBuffers) -> None:
        self._transport, self._buffers = transport, buffers

    def _takes(self, nbytes: int) -> bool:
        if nbytes < MIN_BYTES:
            return False
        self._transport.require_collectives()
        return True

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None, divisor: int | None
    ) -> Request | None:
        """Start an allreduce."""
        if not self._buffers.take(tensor) or not self._takes(tensor.nbytes):
            return None
        two, into = len(self._buffers.ranks) == 2, tensor if out is None else out
        request = SharedMemoryAllreduceRequest if two else SharedMemoryPartwiseAllreduceRequest
        return request(self._buffers, tensor, into, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None
    ) -> Request | None:
        """Start a reduce-scatter."""
        if not self._buffers.take(tensor) or not self._takes(tensor.nbytes):
            return None
        return SharedMemoryReduceScatterRequest(self._buffers, tensor, out, divisor)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request | None:
        """Start a broadcast, if the ranks can read each other's private memory."""
        if not self._buffers.reads_private_memory or not self._takes(tensor.nbytes):
            return None
        return broadcast_request(self._buffers, tensor, root)

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Request | None:
        """Start an allgather, if the ranks can read each other's private memory."""
        if not self._buffers.reads_private_memory or not self._takes(out.nbytes):
            return None
        return allgather_request(self._buffers, tensor, out, counts)
