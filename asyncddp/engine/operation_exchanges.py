"""Opens the message exchanges and collectives of one operation, and closes them at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.engine.chunked_exchange import ChunkedExchange, RaggedExchange
from asyncddp.engine.collective_wait_condition import CollectiveWaitCondition
from asyncddp.engine.exchange_request import ExchangeRequest, PendingReceive, SendWaitCondition
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.errors import PeerError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.shm.collective_slots import CollectiveSlots
from asyncddp.transport.base import Request


class PeerExchanges(Protocol):
    """Exchanges of one operation with peers, over the engine or another group of processes."""

    @property
    def verb(self) -> str:
        """Type of the operation, for messages."""
        ...

    @property
    def key(self) -> MatchKey:
        """Name of the operation, and how often it was used before."""
        ...

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    def exchange(
        self,
        signature: ExchangeSignature,
        sources: Iterable[int],
        targets: Iterable[int],
        streams: DeviceStreams | None = None,
        *,
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> ExchangeRequest:
        """Open an exchange of tensors of one signature with peers, received ``into`` some."""
        ...

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to a target of an open exchange."""
        ...


class OperationExchanges:
    """Exchanges and collectives of one operation: opens them, and closes them when it ends.

    All calls are made under the engine's lock. ``round_number`` tells how often the verb was used
    under its name before, which is the round of a schedule. ``members`` describes the list of
    tensors that it is called on, which all signatures get.
    """

    def __init__(
        self,
        matcher: MessageMatcher,
        verb: str,
        key: MatchKey,
        round_number: int,
        *,
        check: bool,
        members: str = "",
    ) -> None:
        self._matcher, self.check, self.members = matcher, check, members
        self.verb, self.key, self.round_number = verb, key, round_number
        self._exchanges: list[ExchangeRequest] = []
        self._chunked_exchanges: list[ChunkedExchange] = []
        self._requests: list[Request] = []
        self._part = 0
        self.next_may_start = False  # whether what is left of it is matched in any order
        self.agreed = False  # whether all ranks are known to take part in the same collective
        self.differs = False  # whether they are known to call it by different signatures

    @property
    def rank(self) -> int:
        """This rank."""
        return self._matcher.rank

    def slots_of(self, group: str) -> CollectiveSlots | None:
        """Return the slots of a group's collectives; None where not all its ranks share memory."""
        return self._matcher.slots.get(group)

    def exchange(
        self,
        signature: ExchangeSignature,
        sources: Iterable[int],
        targets: Iterable[int],
        streams: DeviceStreams | None = None,
        *,
        peer_access: bool = False,
        row: WeightRow | None = None,
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> ExchangeRequest:
        """Open an exchange with peers; an operation with several gives each a name of its own.

        ``streams`` are of the tensors' device, None on the host. In check mode peers compare the
        row of weights. What fits a tensor of ``into`` is received there, by source. It raises a
        MismatchError if an earlier message contradicts it.
        """
        signature = self._with_members(signature)
        exchange = ExchangeRequest(
            self._next_key(), signature, sources, targets, peer_access=peer_access, into=into
        )
        exchange.streams = streams
        return self._open(exchange, row)

    def chunked_exchange(
        self, signature: ExchangeSignature, row: WeightRow
    ) -> tuple[ChunkedExchange, ExchangeRequest]:
        """Open an exchange chunk by chunk, through ring buffers where these are set up.

        Targets that do not read from the send ring must be sent the tensor with :meth:`send`, as
        part of the request.
        """
        signature = self._with_members(signature)
        exchange = ExchangeRequest(self._next_key(), signature, row.sources, row.dst_weights)
        return self._in_channel(ChunkedExchange, exchange, signature, row)

    def ragged_exchange(
        self,
        signature: ExchangeSignature,
        own: ExchangeSignature | None,
        sources: Iterable[int],
        targets: Iterable[int],
    ) -> tuple[ChunkedExchange, ExchangeRequest]:
        """Open an exchange of tensors whose first dimension may differ between ranks.

        What is said of :meth:`chunked_exchange` holds here too. This rank's tensor has the
        signature ``own``; None for one of several chunks, which goes by message.
        """
        signature = self._with_members(signature)
        exchange = ExchangeRequest(self._next_key(), signature, sources, targets)
        exact = None if own is None else self._with_members(own)
        return self._in_channel(RaggedExchange, exchange, exact)

    def _in_channel(
        self,
        kind: type[ChunkedExchange],
        exchange: ExchangeRequest,
        own: ExchangeSignature | None,
        row: WeightRow | None = None,
    ) -> tuple[ChunkedExchange, ExchangeRequest]:
        """Open an exchange through ring buffers where these are set up."""
        alike = row is None or len(set(row.dst_weights.values())) == 1
        channels, key = self._matcher.channels, exchange.key
        channel = None if own is None else channels.find_or_open(key, own, exchange.targets)
        exchange.channel = channel
        if channel is not None and channel.send_ring is not None and alike and not self.check:
            exchange.ring_targets = exchange.targets & channel.readers
        targets = sorted(exchange.ring_targets)
        chunked = kind(channels, channel, key, exchange.signature, exchange.receives, targets)
        self._chunked_exchanges.append(chunked)
        chunked.request = self._open(exchange, row)
        return chunked, exchange

    def adopt(self, chunked: ChunkedExchange) -> None:
        """Take over a chunked exchange that the calling thread has begun without the engine."""
        sources = [source.peer for source in chunked.sources]
        exchange = ExchangeRequest(chunked.key, chunked.signature, sources, chunked.targets)
        exchange.ring_targets, exchange.channel = exchange.targets, chunked.channel
        self._chunked_exchanges.append(chunked)
        chunked.request = self._open(exchange)

    def skip_exchanges(self, count: int) -> None:
        """Leave out exchanges that other ranks of the operation make among themselves."""
        self._part += count

    def _with_members(self, signature: ExchangeSignature) -> ExchangeSignature:
        return replace(signature, members=self.members) if self.members else signature

    def _next_key(self) -> MatchKey:
        name = self.key.name if self._part == 0 else f"{self.key.name}/{self._part}"
        self._part += 1
        return MatchKey(name, self.key.step)

    def _open(self, exchange: ExchangeRequest, row: WeightRow | None = None) -> ExchangeRequest:
        if row is not None and self.check:
            exchange.row, exchange.rows = row.describe_rows()
        self._matcher.open(exchange, check=self.check)
        self._exchanges.append(exchange)
        return exchange

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to a target of an open exchange."""
        self._matcher.sends.send(exchange, peer, tensor)

    def export(
        self, exchange: ExchangeRequest, targets: Mapping[int, float], tensor: torch.Tensor
    ) -> None:
        """Let targets read multiples of a device tensor, by :meth:`SendQueue.export`."""
        for factor in sorted(set(targets.values())):
            peers = sorted(peer for peer, other in targets.items() if other == factor)
            self._matcher.sends.export(exchange, peers, tensor, factor)

    def open_for_refusal(self, signature: ExchangeSignature, group: Sequence[int]) -> None:
        """Open an exchange with the others of a group, who learn so that the operation fails."""
        others = [peer for peer in group if peer != self.rank]
        self.exchange(signature, others, others)

    def record_collective(
        self, key: MatchKey, signature: ExchangeSignature, group: Sequence[int], begun: int
    ) -> None:
        """Record in the timeline a collective that began at ``begun`` nanoseconds and has ended."""
        self._matcher.channels.tracing.collective(key.name, signature, group, begun)

    def collective(
        self, group: Sequence[int], signature: ExchangeSignature, start: Callable[[], Request]
    ) -> Generator[PendingReceive | CollectiveWaitCondition | SendWaitCondition, None, None]:
        """Take part in a collective of the ranks in ``group``.

        Its signature goes to the next rank of the group, so that ranks which call different
        collectives, dtypes or shapes find out while the collective itself is in progress, and tell
        all: a rank whose part has ended by then raises in its next verb. In check mode, and where
        ranks are known to differ, the signature goes to all, and nothing starts before all
        signatures are known to agree. Where they are known to agree already, none is sent.
        """
        index = group.index(self.rank)
        others = [peer for peer in group if peer != self.rank]
        before, after = group[index - 1], group[(index + 1) % len(group)]
        to_all = self.check or self.differs
        sources, targets = ([before], [after]) if others and not to_all else (others, others)
        if self.agreed:
            sources, targets = [], []
        exchange = self.exchange(signature, sources, targets)
        exchange.audience = frozenset(others)
        for peer in targets:
            self._matcher.sends.announce(exchange, peer)
        for peer in sources if to_all else ():
            yield exchange.receives[peer]
        begun = time.monotonic_ns()
        request = start()
        self._requests.append(request)
        self.next_may_start = True
        yield CollectiveWaitCondition(request, exchange, group, self.rank)
        self.record_collective(exchange.key, signature, group, begun)
        self._requests.remove(request)
        for peer in sources:
            yield exchange.receives[peer]
        if targets:
            yield exchange.sent()

    def raise_if_failed(self) -> None:
        """Raise the error of an exchange that has failed, even if it had completed on this rank."""
        for exchange in self._exchanges:
            exchange.raise_if_failed()

    def count_moves(self) -> int:
        """Count what pieces of the transfers have done; while it changes, they make progress."""
        requests: list[Request | None] = [*self._requests]
        for exchange in self._exchanges:
            requests += [*exchange.sends, *(one.request for one in exchange.receives.values())]
        return sum(getattr(request, "moves", 0) for request in requests)

    def close(self, error: PeerError | None) -> None:
        """End all exchanges, with the error that ended the operation if there was one."""
        for request in self._requests:
            request.abandon()
        for chunked in self._chunked_exchanges:
            chunked.close(failed=error is not None)
        for exchange in self._exchanges:
            self._matcher.close(exchange, error)
            exchange.receives.clear()  # they know each other: without this, memory waits for the gc
            exchange.channel = None
        self._chunked_exchanges.clear()
        self._exchanges.clear()
        self._requests.clear()
