"""Receives tensors that follow a peer's header; drops those that do not fit or are late."""

from __future__ import annotations

import math
import time

import torch

from asyncddp.device.streams import HostStreams, empty_on
from asyncddp.engine.exchange_request import ExchangeRequest, PendingReceive
from asyncddp.engine.messages import SIGNATURE_ONLY, Ack, TensorMessage, mismatch_found_by
from asyncddp.engine.persistent_channels import ChannelTable
from asyncddp.engine.send_queue import SendQueue
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.transport.base import Request, has_ended
from asyncddp.transport.cuda.device_transport import DirectReadTransport

_DISCARD_STREAMS = HostStreams()
"""Streams for bytes that come from a device and are dropped on the host."""


class AnnouncedTensorReceiver:
    """Receives the tensors that peers have announced to this rank by sending a header first."""

    def __init__(self, rank: int, channels: ChannelTable, sends: SendQueue) -> None:
        self._rank, self._channels, self._sends = rank, channels, sends
        self._discards: list[tuple[Request, torch.Tensor | None]] = []

    def accept(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        """Receive a tensor that a peer has announced for an exchange; acknowledge it if asked."""
        receive, dtype = exchange.receives[peer], getattr(torch, message.dtype)
        begun = time.monotonic_ns()
        if message.send_ring is not None and exchange.channel is not None:
            try:
                self._channels.attach_ring(exchange.channel, peer, message.send_ring)
            except OSError as error:
                problem = f"rank {self._rank} cannot map the memory of rank {peer}: {error}"
                exchange.fail(mismatch_found_by(self._rank, problem), problem)
        if message.tag == SIGNATURE_ONLY:
            receive.tensor = empty((0,), dtype)
        elif message.payload is not None:
            receive.tensor = from_bytes(message.payload, dtype, message.shape)
        else:
            self._begin(exchange, peer, message)
        if message.tag != SIGNATURE_ONLY:
            nbytes = math.prod(message.shape) * dtype.itemsize
            receive.request = self._channels.tracing.transfer(
                "receive", exchange, peer, nbytes, begun, receive.request
            )
        answered = peer in exchange.targets - exchange.ring_targets and not message.weights
        if message.wants_ack and not answered:  # this rank's tensor acknowledges as well
            self._sends.put(peer, Ack(message.key))
        if message.mutual and not exchange.rows.get(peer):
            exchange.unacknowledged.discard(peer)

    def _begin(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        """Begin to receive a tensor, or to read it in the peer's memory."""
        receive, dtype = exchange.receives[peer], getattr(torch, message.dtype)
        transport = self._sends.transport_for(exchange.streams)
        if exchange.peer_access and isinstance(transport, DirectReadTransport):
            imported = transport.import_tensor(message.shape, dtype, peer, message.tag)
            receive.import_request = receive.request = imported
            return
        receive.tensor = empty_on(exchange.streams, message.shape, dtype)
        receive.request = transport.irecv(receive.tensor, peer, message.tag)

    def discard(self, peer: int, message: TensorMessage) -> None:
        """Receive and drop the bytes of an unwanted tensor, so that its sender can go on."""
        if message.payload is not None:
            return
        dtype = getattr(torch, message.dtype)
        transport = self._sends.transport_for(None if message.device == "cpu" else _DISCARD_STREAMS)
        if isinstance(transport, DirectReadTransport):
            import_request = transport.import_tensor(message.shape, dtype, peer, message.tag)
            import_request.release()
            self._discards.append((import_request, None))
            return
        scratch = empty(message.shape, dtype)
        self._discards.append((transport.irecv(scratch, peer, message.tag), scratch))

    def discard_receive(self, receive: PendingReceive) -> None:
        """Drop a tensor of a failed exchange once it has been received."""
        if receive.request is not None:
            self._discards.append((receive.request, receive.tensor))

    def free_discards(self) -> None:
        """Free the buffers of unwanted tensors that have been received."""
        if self._discards:
            self._discards = [pair for pair in self._discards if not has_ended(pair[0])]
