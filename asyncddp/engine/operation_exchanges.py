"""Exchanges and collectives of one operation: opened by its steps, closed at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.engine.chunked_exchange import ChunkedExchange, RaggedExchange
from asyncddp.engine.collective_wait_condition import CollectiveWaitCondition
from asyncddp.engine.exchange_request import (
    ExchangeRequest,
    PendingReceive,
    SendCompletionCondition,
)
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.errors import PeerError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.shm.collective_slots import CollectiveSlots
from asyncddp.transport.base import Request


class PeerExchanges(Protocol):
    """Interface of an operation's exchanges with peers, by the engine or torch.distributed."""

    @property
    def verb(self) -> str:
        """Name of the operation's type, for error messages."""
        ...

    @property
    def key(self) -> MatchKey:
        """Match key of the operation: its name, and the number of earlier uses."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this process."""
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
        """Open an exchange of tensors of one signature; ``into`` are tensors to receive into."""
        ...

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to a target of an open exchange."""
        ...


class OperationExchanges:
    """Exchanges and collectives that one operation opens, and that are closed at its end.

    All calls are made under the engine's lock. ``round_number`` counts the verb's earlier uses of
    this name, which is the round of a schedule. ``members`` describes the list of tensors on which
    the operation is called; it becomes part of all signatures.
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
        self.tolerates_loss = False  # whether it goes on without peers that leave, where runs may

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._matcher.rank

    def slots_of(self, group: str) -> CollectiveSlots | None:
        """Return a group's collective slots; None unless all its ranks share memory."""
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
        """Open an exchange with peers; each exchange of an operation has its own name.

        ``streams`` are those of the tensors' device, None on the host. In check mode peers compare
        ``row``. ``into`` maps sources to tensors to receive into, where dtype and shape fit. Raises
        a MismatchError if an earlier message contradicts the exchange.
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
        """Open a chunked exchange, through ring buffers where these are set up.

        The tensor must be sent with :meth:`send`, as part of the request, to targets that do not
        read from the send ring.
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
        """Open a ragged exchange: the tensors' first dimension may differ between ranks.

        See :meth:`chunked_exchange` for targets and sends. This rank's tensor has the signature
        ``own``; None if it has several chunks, so that it is sent by message.
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
        """Open a chunked or ragged exchange, in the channel of its name and signature."""
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
        """Take over a chunked exchange that the caller's thread began without the engine."""
        sources = [source.peer for source in chunked.sources]
        exchange = ExchangeRequest(chunked.key, chunked.signature, sources, chunked.targets)
        exchange.ring_targets, exchange.channel = exchange.targets, chunked.channel
        self._chunked_exchanges.append(chunked)
        chunked.request = self._open(exchange)

    def skip_exchanges(self, count: int) -> None:
        """Skip the names of exchanges that other ranks of the operation make among themselves."""
        self._part += count

    def _with_members(self, signature: ExchangeSignature) -> ExchangeSignature:
        return replace(signature, members=self.members) if self.members else signature

    def _next_key(self) -> MatchKey:
        name = self.key.name if self._part == 0 else f"{self.key.name}/{self._part}"
        self._part += 1
        return MatchKey(name, self.key.step)

    def _open(self, exchange: ExchangeRequest, row: WeightRow | None = None) -> ExchangeRequest:
        exchange.tolerates_loss = self.tolerates_loss and self._matcher.elastic
        if row is not None and self.check and not self._matcher.elastic:
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
        """Export multiples of a device tensor to targets, by :meth:`SendQueue.export`."""
        for factor in sorted(set(targets.values())):
            peers = sorted(peer for peer, other in targets.items() if other == factor)
            self._matcher.sends.export(exchange, peers, tensor, factor)

    def open_for_refusal(self, signature: ExchangeSignature, group: Sequence[int]) -> None:
        """Open an exchange with all others of a group, so that they are notified of the failure."""
        others = [peer for peer in group if peer != self.rank]
        self.exchange(signature, others, others)

    def record_collective(
        self, key: MatchKey, signature: ExchangeSignature, group: Sequence[int], begun: int
    ) -> None:
        """Record in the timeline a collective that has ended; ``begun`` is its start time in ns."""
        self._matcher.channels.tracing.collective(key.name, signature, group, begun)

    def collective(
        self, group: Sequence[int], signature: ExchangeSignature, start: Callable[[], Request]
    ) -> Generator[PendingReceive | CollectiveWaitCondition | SendCompletionCondition, None, None]:
        """Run a transport's collective of the ranks in ``group``, and compare signatures.

        The signature is sent to the next rank of the group, so that ranks that call different
        collectives, dtypes or shapes detect it while the collective is in progress, and notify all;
        a rank whose part has ended by then raises in its next verb. In check mode, and if ranks are
        known to differ, the signature is sent to all, and the collective starts only after all
        signatures agree. If they are known to agree already, none is sent.
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
        """Raise the error of any failed exchange, even if it had completed on this rank."""
        for exchange in self._exchanges:
            exchange.raise_if_failed()

    def count_moves(self) -> int:
        """Count the progress of transfers that move in pieces; a changed count means progress."""
        requests: list[Request | None] = [*self._requests]
        for exchange in self._exchanges:
            requests += [request for _, request in exchange.sends]
            requests += [one.request for one in exchange.receives.values()]
        return sum(getattr(request, "moves", 0) for request in requests)

    def close(self, error: PeerError | None) -> None:
        """Close all exchanges, with the error of the operation if it has failed."""
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
