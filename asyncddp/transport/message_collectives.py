"""Collectives of a transport, made of its own sends and receives.

Where each machine has several ranks that share memory, a large tensor is summed inside machines
first. Then each rank of a machine sums its part of it with its counterparts on the others, so that
every machine sends one tensor in all, over as many connections as it has ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from asyncddp.tensors.allocation import empty, zeros
from asyncddp.tensors.means import first_divisor, rounds
from asyncddp.transport import collective_algorithms as algorithms
from asyncddp.transport.base import Request, is_short
from asyncddp.transport.collective_algorithms import CollectiveMessages, PointToPoint, Steps
from asyncddp.transport.collective_request import CollectiveRequest, RunningCollectives
from asyncddp.transport.shared_memory.collective_buffers import SharedCollectiveBuffers
from asyncddp.transport.shared_memory.collective_requests import (
    SharedMemoryReduceScatterRequest,
)

_MIN_PIECE, _MAX_PIECE = 1 << 18, 1 << 20  # bytes that a rank sends at once of a large tensor
_MAX_DIRECT = 1 << 22  # bytes of a piece of which ranks send the parts directly
_PIECES = 4  # into which a tensor is cut where these are not too small: they overlap
_LANES = 16  # pieces of one collective with tags of their own


class MessageCollectives:
    """Collectives of a transport's ranks, made of its sends and receives.

    Args:
        endpoint: Sends and receives, with ``tags`` that nothing else uses.
        rank: This rank.
        machines: The ranks of each machine, in the same order on all ranks.
        tags: Tags for the pieces of collectives; each piece takes one.
        running: Collectives in progress.
    """

    def __init__(
        self,
        endpoint: PointToPoint,
        rank: int,
        machines: Sequence[Sequence[int]],
        tags: range,
        running: RunningCollectives,
    ) -> None:
        self._endpoint, self._rank, self._running = endpoint, rank, running
        self._machines = machines
        self._ring = [member for machine in machines for member in machine]
        self._machine = next(machine for machine in machines if rank in machine)
        self._buffers: SharedCollectiveBuffers | None = None
        self._counterparts: list[int] = []
        self._tags = itertools.cycle(tags[::_LANES])

    def sum_by_machines(self, buffers: SharedCollectiveBuffers | None) -> None:
        """Sum in each machine's shared buffers first, if machines have equally many ranks."""
        place = self._machine.index(self._rank)
        if len({len(machine) for machine in self._machines}) == 1:
            self._buffers = buffers
            self._counterparts = [machine[place] for machine in self._machines]

    def allreduce(self, tensor: torch.Tensor, into: torch.Tensor, divisor: int | None) -> Request:
        """Start an allreduce of a tensor into another, and divide the sum."""
        if self._buffers is not None and self._buffers.take(tensor):
            return self._allreduce_by_machines(self._buffers, tensor, into, divisor)
        step = _part(tensor, len(self._ring)) * len(self._ring)
        allreduce = partial(algorithms.allreduce, divisor=divisor)
        return self._by_pieces(allreduce, _pieces(tensor, step), _pieces(into, step))

    def _allreduce_by_machines(
        self,
        buffers: SharedCollectiveBuffers,
        tensor: torch.Tensor,
        into: torch.Tensor,
        divisor: int | None,
    ) -> Request:
        """Reduce-scatter inside machines, allreduce between them, allgather inside."""
        ranks, count = len(self._machine), tensor.numel()
        given, taken = tensor.detach().view(-1), into.detach().view(-1)
        finish = None
        if count % ranks:
            given, whole = zeros((count + -count % ranks,), tensor.dtype), taken
            given[:count].copy_(tensor.detach().view(-1))
            taken = empty(given.shape, into.dtype)

            def finish() -> object:
                return whole.copy_(taken[:count])

        wide = torch.float64 if divisor is not None and rounds(tensor.dtype) else tensor.dtype
        part = empty((len(given) // ranks,), wide)
        first = None if divisor is None else first_divisor(divisor)
        rest = None if divisor is None or first is None else divisor / first
        summed = SharedMemoryReduceScatterRequest(buffers, given, part, first)
        step = _part(part, len(self._counterparts)) * len(self._counterparts)
        lanes = zip(self._lanes(self._counterparts), self._lanes(self._machine), strict=False)
        rows = torch.split(taken.view(ranks, -1), step, dim=1)
        return self._request(
            (
                algorithms.sum_between_machines(lane, inside, summed, piece, list(row), rest)
                for piece, row, (lane, inside) in zip(
                    _pieces(part, step), rows, lanes, strict=False
                )
            ),
            finish,
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None
    ) -> Request:
        """Start a reduce-scatter; this rank keeps its part of the sum."""
        step = _part(tensor, len(self._ring))
        columns = torch.split(tensor.detach().view(len(self._ring), out.numel()), step, dim=1)
        parts = [[column[member] for member in self._ring] for column in columns]
        reduce_scatter = partial(algorithms.reduce_scatter, divisor=divisor)
        return self._by_pieces(reduce_scatter, parts, _pieces(out, step))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast from the root, in place."""
        broadcast = partial(algorithms.broadcast, root=self._ring.index(root))
        return self._by_pieces(broadcast, _pieces(tensor, _step(tensor.nbytes, tensor)))

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather; rank r contributes ``counts[r]`` elements."""
        parts = list(torch.split(out.detach().view(-1), list(counts)))
        parts[self._rank].copy_(tensor.detach().view(-1))
        short = is_short(out.nbytes, len(self._ring))
        lane = next(self._lanes(self._ring))
        ordered = [parts[member] for member in self._ring]
        directly = short or lane.few
        return self._request([algorithms.allgather(lane, ordered, directly=directly)])

    def barrier(self) -> Request:
        """Start a barrier."""
        return self._request([algorithms.barrier(next(self._lanes(self._ring)))])

    def _by_pieces(self, algorithm: Callable[..., Steps], *pieces: Sequence[Any]) -> Request:
        """Start a collective of all ranks, piece by piece; the algorithm takes one of each kind."""
        lanes = zip(self._lanes(self._ring), zip(*pieces, strict=True), strict=False)
        return self._request(algorithm(lane, *piece) for lane, piece in lanes)

    def _lanes(self, members: Sequence[int]) -> Iterator[CollectiveMessages]:
        """Yield exchanges among members that cycle through one collective's tags."""
        tag, place = next(self._tags), members.index(self._rank)
        return (
            CollectiveMessages(self._endpoint, members, place, tag + lane)
            for lane in itertools.cycle(range(_LANES))
        )

    def _request(
        self, pieces: Iterable[Steps], finish: Callable[[], object] | None = None
    ) -> Request:
        return CollectiveRequest(self._running, pieces, finish)


def _step(nbytes: int, tensor: torch.Tensor, most: int = _MAX_PIECE) -> int:
    """Return how many elements of a given size a rank sends at once, in equal pieces."""
    size = min(most, max(_MIN_PIECE, nbytes // _PIECES))
    pieces = max(1, round(nbytes / size))
    return max(1, -(-nbytes // (pieces * tensor.element_size())))


def _part(tensor: torch.Tensor, ranks: int) -> int:
    """Return how many elements of a piece each rank sums."""
    few = ranks <= algorithms.FEW_RANKS  # a rank then keeps all terms of its part for a while
    most = max(_MIN_PIECE, min(_MAX_PIECE, _MAX_DIRECT // ranks)) if few else _MAX_PIECE
    return _step(-(-tensor.nbytes // ranks), tensor, most)


def _pieces(tensor: torch.Tensor, step: int) -> Sequence[torch.Tensor]:
    return torch.split(tensor.detach().view(-1), step)
