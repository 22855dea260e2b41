"""Collectives as sequences of sends and receives between the ranks of a group.

Each is a generator that yields the requests it waits for. What is short goes from every rank to
every other at once. Of what is long, every rank sums a part, which few ranks send it directly: two
messages in a row whatever their number. Among many it goes around a ring, in which every rank sends
to the next one alone. Either way a rank sends the same bytes. A sum is formed once, by one rank for
all, or in the order of the ranks by each: all get the same bits.

References:
    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
    2005.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from asyncddp.tensors.allocation import empty
from asyncddp.tensors.means import add, rounds, scaled, split_divisor, sum_of
from asyncddp.transport.base import Request, is_short


class PointToPointRequest(Request, Protocol):
    """Interface of a send or receive request that can be tested without making progress."""

    def test(self) -> bool:
        """Test for completion; raise the error of a failed transfer."""
        ...


class PointToPoint(Protocol):
    """Interface of a transport's sends and receives, with tags reserved for collectives."""

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> PointToPointRequest:
        """Start to send a contiguous tensor."""
        ...

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> PointToPointRequest:
        """Start to receive a contiguous tensor."""
        ...


Steps: TypeAlias = Iterator[list[PointToPointRequest]]
FEW_RANKS = 16
"""So many ranks at most send parts of a tensor directly, over a connection to each other rank."""


@dataclass(frozen=True)
class CollectiveMessages:
    """Sends and receives of one collective among ``members``, under its own tag.

    Ranks are indices into ``members`` here; ``rank`` is this rank's index.
    """

    endpoint: PointToPoint
    members: Sequence[int]
    rank: int
    tag: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def send(self, data: torch.Tensor, peer: int) -> PointToPointRequest:
        """Start to send a contiguous tensor."""
        return self.endpoint.isend(data, self.members[peer % self.size], self.tag)

    def receive(self, out: torch.Tensor, peer: int) -> PointToPointRequest:
        """Start to receive a contiguous tensor."""
        return self.endpoint.irecv(out, self.members[peer % self.size], self.tag)

    @property
    def few(self) -> bool:
        """True if so few members take part that each sends to every other directly."""
        return self.size <= FEW_RANKS

    def others(self) -> list[int]:
        """List the other ranks, starting after this one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def barrier(exchange: CollectiveMessages) -> Steps:
    """Dissemination barrier: log2(n) rounds of empty messages over doubling distances."""
    nothing, distance = empty((0,), torch.uint8), 1
    while distance < exchange.size:
        yield [
            exchange.send(nothing, exchange.rank + distance),
            exchange.receive(nothing, exchange.rank - distance),
        ]
        distance *= 2


def broadcast(exchange: CollectiveMessages, tensor: torch.Tensor, root: int) -> Steps:
    """Broadcast along a binomial tree rooted at the root."""
    size, place = exchange.size, (exchange.rank - root) % exchange.size
    bit = 1
    while bit < size and not place & bit:
        bit *= 2
    if place:
        yield [exchange.receive(tensor, exchange.rank - bit)]
    children = []
    while bit > 1:
        bit //= 2
        if place + bit < size:
            children.append(exchange.rank + bit)
    yield [exchange.send(tensor, child) for child in children]


def allgather(
    exchange: CollectiveMessages, parts: Sequence[torch.Tensor], *, directly: bool
) -> Steps:
    """Gather all parts on every rank; rank r starts with ``parts[r]`` in place."""
    rank, size = exchange.rank, exchange.size
    if directly:
        yield [
            *(exchange.receive(parts[peer], peer) for peer in exchange.others()),
            *(exchange.send(parts[rank], peer) for peer in exchange.others()),
        ]
        return
    for step in range(size - 1):
        yield [
            exchange.receive(parts[(rank - step - 1) % size], rank - 1),
            exchange.send(parts[(rank - step) % size], rank + 1),
        ]


def reduce_scatter(
    exchange: CollectiveMessages,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    divisor: float | None = None,
) -> Steps:
    """Sum part r of all ranks on rank r, into ``out``; ``parts`` are not modified."""
    scale, rest = split_divisor(divisor)
    rounding = divisor is not None and rounds(out.dtype)
    total = empty(out.shape, torch.float64) if rounding else out
    if exchange.few:
        yield from _reduce_directly(exchange, parts, total, scale)
    else:
        wide = [part.to(total.dtype) for part in parts] if rounding else parts
        yield from _reduce_in_ring(exchange, wide, total, scale)
    if rest != 1:
        total.div_(rest)
    if rounding:
        out.copy_(total.round_())


def _reduce_directly(
    exchange: CollectiveMessages, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float
) -> Steps:
    """Sum the other ranks' terms of this rank's part while further terms arrive."""
    own = parts[exchange.rank]
    terms = {peer: empty(own.shape, own.dtype) for peer in exchange.others()}
    receives = [exchange.receive(term, peer) for peer, term in terms.items()]
    sends = [exchange.send(parts[peer], peer) for peer in terms]
    scaled(own, scale, out)
    for receive, term in zip(receives, terms.values(), strict=True):
        yield [receive]
        add(out, term, scale)
    yield sends


def _reduce_in_ring(
    exchange: CollectiveMessages, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float
) -> Steps:
    """Pass partial sums around the ring; each rank adds its own term."""
    rank, size = exchange.rank, exchange.size
    given = parts[(rank - 1) % size]
    if scale != 1:
        given = scaled(given, scale, empty(given.shape, given.dtype))
    for step in range(size - 1):
        mine = parts[(rank - step - 2) % size]
        taken = out if step == size - 2 else empty(mine.shape, mine.dtype)
        yield [exchange.receive(taken, rank - 1), exchange.send(given, rank + 1)]
        add(taken, mine, scale)
        given = taken


def allreduce(
    exchange: CollectiveMessages, tensor: torch.Tensor, out: torch.Tensor, divisor: float | None
) -> Steps:
    """Sum flat tensors of all ranks into ``out``, and divide the sum."""
    if is_short(tensor.nbytes):
        every = empty((exchange.size, tensor.numel()), tensor.dtype)
        every[exchange.rank].copy_(tensor)
        yield from allgather(exchange, list(every), directly=True)
        sum_of(list(every), divisor, out)
        return
    sums = list(torch.tensor_split(out, exchange.size))
    parts = list(torch.tensor_split(tensor, exchange.size))
    mine = empty(sums[exchange.rank].shape, out.dtype)
    yield from reduce_scatter(exchange, parts, mine, divisor)
    sums[exchange.rank].copy_(mine)
    yield from allgather(exchange, sums, directly=exchange.few)


def sum_between_machines(
    exchange: CollectiveMessages,
    inside: CollectiveMessages,
    machine_sum: PointToPointRequest,
    part: torch.Tensor,
    sums: Sequence[torch.Tensor],
    divisor: float | None,
) -> Steps:
    """Sum this rank's part across machines, and gather all parts inside its machine.

    ``machine_sum`` ends once ``part`` is the sum over this machine; ``sums`` get all its ranks'.
    """
    yield [machine_sum]
    rounding = part.dtype != sums[inside.rank].dtype
    total = empty(part.shape, part.dtype) if rounding else sums[inside.rank]
    yield from allreduce(exchange, part, total, divisor)
    if rounding:
        sums[inside.rank].copy_(total.round_())
    yield from allgather(inside, sums, directly=True)
