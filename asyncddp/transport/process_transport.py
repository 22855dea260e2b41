"""Transport between processes: its collectives, by shared memory, MPI, or sends and receives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from typing_extensions import override

from asyncddp.transport.base import Request, Transport
from asyncddp.transport.shared_memory.collective_buffers import MIN_BYTES, SharedCollectiveBuffers
from asyncddp.transport.shared_memory.collective_requests import (
    SharedMemoryReduceScatterRequest,
    allgather_request,
    allreduce_request,
    broadcast_request,
)
from asyncddp.transport.shared_memory.group_formation import RecordGatherer, open_slots

_Start: TypeAlias = Callable[..., Request]
_REDUCTIONS: dict[str, _Start] = {
    "allreduce": allreduce_request,
    "reduce_scatter": SharedMemoryReduceScatterRequest,
}
_COPIES: dict[str, _Start] = {"broadcast": broadcast_request, "allgather": allgather_request}


class Collectives(Protocol):
    """Interface of the collectives of a transport, as :class:`Transport` defines them."""

    def allreduce(self, tensor: torch.Tensor, into: torch.Tensor, divisor: int | None) -> Request:
        """Start an allreduce of a tensor into another, and divide the sum."""
        ...

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None
    ) -> Request:
        """Start a reduce-scatter; this rank keeps its part of the sum."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast from the root, in place."""
        ...

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather; rank r contributes ``counts[r]`` elements."""
        ...

    def barrier(self) -> Request:
        """Start a barrier."""
        ...


class ProcessTransport(Transport):
    """Base class of transports between processes: large collectives go through shared memory."""

    _shared: SharedCollectiveBuffers | None = None  # of all its ranks
    _machine_buffers: SharedCollectiveBuffers | None = None  # of those of this machine alone
    _lock: AbstractContextManager[object] = nullcontext()  # held while a collective starts

    def _open_shared_memory(
        self, members: Sequence[int], gather_there: RecordGatherer, gather: RecordGatherer
    ) -> None:
        """Open what the group of ranks that share memory needs for collectives; collective.

        ``members`` are these ranks, among which ``gather_there`` gathers; ``gather`` is among all.
        """
        group = self.shared_memory_group
        buffers = SharedCollectiveBuffers.open(
            group, members, self.rank, gather_there, self.break_collectives
        )
        if len(members) == self.size:
            self._shared = buffers
        else:
            self._machine_buffers = buffers
        self.collective_slots = open_slots(group, self.size, self.rank, gather)

    def _close_shared_memory(self, *, world: bool) -> None:
        """Drop the shared buffers and slots; for the ``world``, also free unused shared memory."""
        if world and self.shared_memory_group is not None:
            self.shared_memory_group.arena.close()
            self.shared_memory_group = None
        self._shared = self._machine_buffers = self.collective_slots = None

    @abstractmethod
    def _collectives_of(self, verb: str, nbytes: int) -> Collectives:
        """Choose who runs a collective that does not go through shared memory."""

    def _start(self, verb: str, nbytes: int, *given: Any) -> Request:
        """Start a collective of ``nbytes``, equal on all ranks, in the fastest way."""
        with self._lock:
            self.require_collectives()
            request = (
                None if self._shared is None else _in_memory(self._shared, verb, nbytes, given)
            )
            if request is None:
                request = getattr(self._collectives_of(verb, nbytes), verb)(*given)
            return request

    @override
    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        into = tensor if out is None else out
        return self._start("allreduce", tensor.nbytes, tensor, into, divisor)

    @override
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        return self._start("reduce_scatter", tensor.nbytes, tensor, out, divisor)

    @override
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        return self._start("broadcast", tensor.nbytes, tensor, root)

    @override
    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        return self._start("allgather", out.nbytes, tensor, out, counts)

    @override
    def ibarrier(self) -> Request:
        return self._start("barrier", 0)


def _in_memory(
    buffers: SharedCollectiveBuffers, verb: str, nbytes: int, given: Sequence[Any]
) -> Request | None:
    """Start a collective through shared memory; return None if messages are faster."""
    if verb in _REDUCTIONS and buffers.take(given[0]):
        return _REDUCTIONS[verb](buffers, *given)
    if verb in _COPIES and nbytes >= MIN_BYTES and buffers.reads_private_memory:
        return _COPIES[verb](buffers, *given)
    return None
