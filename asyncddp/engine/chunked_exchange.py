"""Chunked exchange: sends a tensor to several peers, and receives theirs, chunk by chunk.

Chunks go through ring buffers in shared memory if these are set up, otherwise by message. While the
calling thread drives the exchange without having to wait, there is no exchange request. One is made
when the exchange has to wait, so that contradicting messages are matched with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from typing_extensions import override

from asyncddp.engine.exchange_request import ExchangeRequest, PendingReceive
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.engine.persistent_channels import PersistentChannel, PersistentChannelTable
from asyncddp.errors import MismatchError
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.shm.ring_buffer import ReceiveRingBuffer, SendRingBuffer

_WHOLE = ChunkLayout.single((), torch.uint8)
"""Layout with a single chunk of any size."""


class ChunkReceiver:
    """Receiver of a peer's tensor chunk by chunk; also the wait condition for the current chunk."""

    def __init__(self, exchange: ChunkedExchange, peer: int) -> None:
        self._exchange, self.peer = exchange, peer
        self._number = 0
        self.left = False  # whether the peer has left before the current chunk was here
        self._looked = False
        self._flat: torch.Tensor | None = None

    def for_chunk(self, number: int) -> ChunkReceiver:
        """Select the current chunk, and return this receiver as the wait condition for it."""
        self._number = number
        return self

    def done(self) -> bool:
        """Return whether the current chunk is here, or its rank has left; raise if it failed."""
        exchange = self._exchange
        exchange.raise_if_failed()
        if not exchange.is_first_in_flight:
            return False
        receive_ring, step = exchange.ring_from(self.peer), exchange.key.step
        if (
            receive_ring is not None
            and receive_ring.published(step) > self._number
            and receive_ring.is_addressed(step)
        ):
            return True
        receive = self.receive
        self.left = receive is not None and receive.left
        return receive is not None and receive.done()

    @property
    def receive(self) -> PendingReceive | None:
        """Pending receive of the peer's tensor by message; None without an exchange request."""
        request = self._exchange.request
        return None if request is None else request.receives[self.peer]

    def take(self) -> torch.Tensor:
        """Return the current chunk, which has arrived, as a flat tensor."""
        exchange, peer, step = self._exchange, self.peer, self._exchange.key.step
        receive, channel = self.receive, exchange.channel
        receive_ring = exchange.ring_from(peer)
        if receive is not None and receive.tensor is not None:
            self._flat = receive.tensor.reshape(-1)
        elif channel is not None and receive_ring is not None and not self._looked:
            self._looked = True
            handle = receive_ring.tensor_handle(step)
            if handle is not None:
                self._flat = exchange.channels.map_tensor(peer, channel, handle)
        if self._flat is not None:
            return exchange.layout.chunk(self._flat, self._number)
        if receive_ring is None:
            raise RuntimeError("there is no ring buffer")
        return receive_ring.slot(step, self._number)

    def release(self) -> None:
        """Acknowledge to the sender that the current chunk has been read."""
        receive_ring, step = self._exchange.ring_from(self.peer), self._exchange.key.step
        if receive_ring is not None and receive_ring.published(step):
            receive_ring.acknowledge(step, self._number + 1)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the awaited peer, with the match key."""
        return [(self.peer, self._exchange.key)]


class ChunkedExchange:
    """Exchange of tensors with peers, chunk by chunk; also the wait condition for sending a chunk.

    ``targets`` are the ranks that read this rank's ring buffer. Without a ``channel`` there is a
    single chunk. An exchange that has ``begun`` is listed in the channel already, and has published
    ``published`` chunks.
    """

    def __init__(
        self,
        channels: PersistentChannelTable,
        channel: PersistentChannel | None,
        key: MatchKey,
        signature: ExchangeSignature,
        sources: Iterable[int],
        targets: Sequence[int],
        *,
        begun: bool = False,
        published: int = 0,
    ) -> None:
        self.channels, self.channel = channels, channel
        self.key, self.signature = key, signature
        self.layout = _WHOLE if channel is None else channel.layout
        self.sources = [ChunkReceiver(self, peer) for peer in sources]
        self.targets = tuple(targets)
        self.request: ExchangeRequest | None = None  # with which messages are matched, once made
        self._send_ring = None if channel is None or not self.targets else channel.send_ring
        self._number = 0
        self._mapped, self._published = False, published
        if channel is not None and not begun:
            channel.in_flight.append(key.step)

    @property
    def is_first_in_flight(self) -> bool:
        """True once all earlier steps of the channel have ended on this rank."""
        return self.channel is None or self.channel.in_flight[0] == self.key.step

    def raise_if_failed(self) -> None:
        """Raise the error of this exchange if it has failed."""
        if self.request is not None:
            self.request.raise_if_failed()
        channel = self.channel
        if channel is not None:
            if channel.error is not None:
                error = channel.error
                self.channels.discard_error(error)
                raise error
            if self._send_ring is not None and channel.send_ring is not self._send_ring:
                name = self.key.name
                raise MismatchError(f"an exchange under the name {name!r} failed before {self.key}")

    # sending

    def for_chunk(self, number: int) -> ChunkedExchange:
        """Select the current chunk, and return this exchange as its send's wait condition."""
        self._number = number
        return self

    def done(self) -> bool:
        """Return whether the ring has room for the current chunk; raise the error of a failure."""
        self.raise_if_failed()
        if self._send_ring is None:
            return True
        if not self.is_first_in_flight:
            return False
        if self._number < self._published:
            return True
        if self._number == 0:
            return self._send_ring.has_room(self.key.step)
        return self._mapped or not self._lagging()

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peers that must read earlier chunks before the current chunk can be sent."""
        return [(rank, MatchKey(self.key.name, step)) for rank, step in self._lagging()]

    def _lagging(self) -> list[tuple[int, int]]:
        """Return the readers, with their steps, that still read the current chunk's slot."""
        if self._send_ring is None:
            return []
        needed = self._number - self._send_ring.cycle + 1
        if self._number > 0 and needed <= 0:
            return []
        return self._send_ring.pending_readers(self.key.step, needed)

    def send_chunk(
        self, number: int, flat: torch.Tensor, factor: float, handle: SharedMemoryHandle | None
    ) -> None:
        """Publish chunk ``number`` of a flat tensor, times a factor; there must be room.

        With a handle, peers read the whole tensor in its own memory.
        """
        send_ring, step = self._send_ring, self.key.step
        if send_ring is None or number < self._published:
            return
        if number == 0:
            self._mapped = handle is not None
            send_ring.begin(step, self.targets, handle)
            if self._mapped:
                send_ring.publish(step, self.layout.num_chunks)
        if self._mapped:
            return
        send_ring.send_chunk(step, number, self.layout.chunk(flat, number), factor)

    def chunks_read(self, number: int) -> ChunkReadWaitCondition:
        """Return the wait condition that all targets have read the first ``number`` chunks."""
        return ChunkReadWaitCondition(self, self._send_ring, number)

    # receiving

    def ring_from(self, peer: int) -> ReceiveRingBuffer | None:
        """Return the ring buffer from a peer; None if its tensor comes by message."""
        return None if self.channel is None else self.channel.receive_rings.get(peer)

    def first_received(self) -> torch.Tensor | None:
        """Return the first source's tensor if it was received by message, else None."""
        receive = self.sources[0].receive if self.sources else None
        return None if receive is None else receive.tensor

    def close(self, *, failed: bool) -> None:
        """End the exchange; a second call does nothing."""
        peers = [source.peer for source in self.sources]
        self.sources.clear()  # they know each other: without this, memory waits for the gc
        channel, step = self.channel, self.key.step
        if channel is None or step not in channel.in_flight:
            return
        channel.in_flight.remove(step)
        if not failed:
            targets = self.targets if self.request is None else self.request.targets
            channel.record(step, peers, targets)
            return
        for peer in peers:
            receive_ring = channel.receive_rings.get(peer)
            if receive_ring is not None:  # so that the sender need not wait for this rank
                receive_ring.acknowledge(step, self.layout.num_chunks)
        if channel.send_ring is self._send_ring:
            self.channels.retire_ring(channel)


class RaggedExchange(ChunkedExchange):
    """Exchange of tensors in one chunk each, whose first dimension may differ between ranks.

    A channel is for tensors of one shape, so that a peer's tensor may come through another channel
    of the same name than this rank's tensor.
    """

    @override
    def ring_from(self, peer: int) -> ReceiveRingBuffer | None:
        step, form = self.key.step, self.signature
        for channel in self.channels.find_all(self.key.name):
            its, receive_ring = channel.signature, channel.receive_rings.get(peer)
            if (
                receive_ring is not None
                and receive_ring.published(step)
                and (its.verb, its.dtype, its.shape[1:]) == (form.verb, form.dtype, form.shape[1:])
            ):
                return receive_ring
        return None


class ChunkReadWaitCondition:
    """Wait condition: all readers of this rank's ring buffer have read a number of chunks."""

    def __init__(self, exchange: ChunkedExchange, ring: SendRingBuffer | None, number: int) -> None:
        self._exchange, self._ring, self._number = exchange, ring, number

    def done(self) -> bool:
        """Return whether all readers have read the chunks; raise the error of a failed exchange."""
        self._exchange.raise_if_failed()
        return not self.missing()

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the readers that have not read the chunks yet, with their match keys."""
        if self._ring is None:
            return []
        key = self._exchange.key
        lagging = self._ring.pending_readers(key.step, self._number)
        return [(rank, MatchKey(key.name, step)) for rank, step in lagging]
