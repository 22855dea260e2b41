"""Chunked exchange: sends a tensor to several peers and receives theirs, one chunk after another.

Chunks go through ring buffers in shared memory where these are set up, and by message elsewhere.
While the calling thread drives the exchange and all chunks come at once, it has no exchange
request; it gets one when it has to wait, so that messages that contradict it are matched with it.
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
"""Layout of one chunk, whatever its size."""


class ChunkReceiver:
    """Receives one peer's tensor in chunks; also the wait condition that the next has come."""

    def __init__(self, exchange: ChunkedExchange, peer: int) -> None:
        self._exchange, self.peer = exchange, peer
        self._number = 0
        self._looked = False
        self._flat: torch.Tensor | None = None

    def for_chunk(self, number: int) -> ChunkReceiver:
        """Select the chunk to wait for, and return this receiver as the wait condition."""
        self._number = number
        return self

    def done(self) -> bool:
        """Tell whether the current chunk can be read; raises what made the exchange fail."""
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
        return receive is not None and receive.done()

    @property
    def receive(self) -> PendingReceive | None:
        """Pending receive of the peer's tensor, where that comes by message."""
        request = self._exchange.request
        return None if request is None else request.receives[self.peer]

    def take(self) -> torch.Tensor:
        """Return the current chunk as a flat tensor, once it is here."""
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
        """Acknowledge that the current chunk has been read."""
        receive_ring, step = self._exchange.ring_from(self.peer), self._exchange.key.step
        if receive_ring is not None and receive_ring.published(step):
            receive_ring.acknowledge(step, self._number + 1)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peer that holds up the chunk, with the match key."""
        return [(self.peer, self._exchange.key)]


class ChunkedExchange:
    """Exchange in which a rank sends its tensor to peers and receives theirs, chunk by chunk.

    As a wait condition it is done once the ring has room for the current chunk. ``targets`` are the
    ranks that read this rank's ring; tensors stay whole without a ``channel``. An exchange that has
    ``begun`` is listed in the channel already, with so many of its chunks ``published``.
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
        """True once all earlier steps of the channel have ended here."""
        return self.channel is None or self.channel.in_flight[0] == self.key.step

    def raise_if_failed(self) -> None:
        """Raise what made this exchange fail, if something did."""
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
        """Select the chunk to send next, and return this exchange as the wait condition."""
        self._number = number
        return self

    def done(self) -> bool:
        """Tell whether there is room for the current chunk; raises what made the exchange fail."""
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
        """Return the peers that have yet to read before the current chunk can be sent."""
        return [(rank, MatchKey(self.key.name, step)) for rank, step in self._lagging()]

    def _lagging(self) -> list[tuple[int, int]]:
        """Return the readers that lag so far behind that there is no room."""
        if self._send_ring is None:
            return []
        needed = self._number - self._send_ring.cycle + 1
        if self._number > 0 and needed <= 0:
            return []
        return self._send_ring.pending_readers(self.key.step, needed)

    def send_chunk(
        self, number: int, flat: torch.Tensor, factor: float, handle: SharedMemoryHandle | None
    ) -> None:
        """Publish chunk ``number`` of a flat tensor, times a factor, once there is room.

        Where there is a handle, all of it is read in its own memory.
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
        """Return the condition that all targets have read the first ``number`` chunks."""
        return ChunkReadWaitCondition(self, self._send_ring, number)

    # receiving

    def ring_from(self, peer: int) -> ReceiveRingBuffer | None:
        """Return the ring buffer in which a peer's tensor comes, unless it comes by message."""
        return None if self.channel is None else self.channel.receive_rings.get(peer)

    def first_received(self) -> torch.Tensor | None:
        """Return the first source's tensor, if it came by message into a buffer of its own."""
        receive = self.sources[0].receive if self.sources else None
        return None if receive is None else receive.tensor

    def close(self, *, failed: bool) -> None:
        """End the exchange; harmless when called twice."""
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
    """Exchange of whole tensors, whose first dimension may differ between ranks.

    A channel is for tensors of one shape, so that a peer's may come through another channel of the
    name than that by which this rank's goes.
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
    """Wait condition: all readers of a ring buffer have read its first n chunks."""

    def __init__(self, exchange: ChunkedExchange, ring: SendRingBuffer | None, number: int) -> None:
        self._exchange, self._ring, self._number = exchange, ring, number

    def done(self) -> bool:
        """Tell whether all readers have read the chunks; raises what made the exchange fail."""
        self._exchange.raise_if_failed()
        return not self.missing()

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the readers that have yet to read the chunks, with their match keys."""
        if self._ring is None:
            return []
        key = self._exchange.key
        lagging = self._ring.pending_readers(key.step, self._number)
        return [(rank, MatchKey(key.name, step)) for rank, step in lagging]
