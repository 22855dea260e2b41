"""Receiver of tensors that peers have announced by a header; unwanted tensors are discarded."""

from __future__ import annotations

import math
import time
from typing import TypeGuard

import torch

from asyncddp.device.stream_interfaces import HostStreams, empty_on
from asyncddp.engine.exchange_request import ExchangeRequest, PendingReceive
from asyncddp.engine.messages import (
    SIGNATURE_ONLY,
    Ack,
    ActiveMessage,
    ExchangeSignature,
    TensorMessage,
    mismatch_found_by,
)
from asyncddp.engine.persistent_channels import PersistentChannelTable
from asyncddp.engine.send_queue import SendQueue
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.transport.base import TRANSFER_ERRORS, Request, has_ended
from asyncddp.transport.cuda.device_transport import DirectReadTransport

_DISCARD_STREAMS = HostStreams()
"""Streams for receiving unwanted device tensors into host memory."""


class AnnouncedTensorReceiver:
    """Receiver of tensors announced by a header: posts receives, and discards unwanted tensors."""

    def __init__(self, rank: int, channels: PersistentChannelTable, sends: SendQueue) -> None:
        self._rank, self._channels, self._sends = rank, channels, sends
        self._unwanted: list[tuple[int, TensorMessage | ActiveMessage]] = []  # not yet received
        self._discards: list[tuple[Request, torch.Tensor | None]] = []

    def accept(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        """Begin to receive a tensor announced for an exchange, and acknowledge it if requested.

        If that fails, as for lack of memory, the exchange fails.
        """
        try:
            self._accept(exchange, peer, message)
        except TRANSFER_ERRORS as cause:
            nbytes = math.prod(message.shape) * getattr(torch, message.dtype).itemsize
            error = PeerError(
                f"rank {self._rank}, {exchange.signature.verb} {exchange.key}: {nbytes} bytes of "
                f"rank {peer} could not be received ({type(cause).__name__}: {cause}). Where "
                "memory is short, use smaller tensors or batches; later calls work"
            )
            error.origin, error.__cause__ = self._rank, cause
            exchange.fail(error, str(error))
            self.discard(peer, message)

    def _accept(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        receive, dtype = exchange.receives[peer], getattr(torch, message.dtype)
        begun = time.monotonic_ns()
        if message.send_ring is not None:
            form = ExchangeSignature(
                message.verb, message.dtype, tuple(message.shape), message.device, message.members
            )
            try:
                channel = self._channels.find_or_open(exchange.key, form, ())
                if channel is not None:
                    self._channels.attach_ring(channel, peer, message.send_ring)
            except OSError as error:
                problem = f"rank {self._rank} cannot map the memory of rank {peer}: {error}"
                exchange.fail(mismatch_found_by(self._rank, problem), problem)
        if message.tag == SIGNATURE_ONLY:
            receive.tensor = empty((0,), dtype)
        elif message.payload is not None:
            receive.tensor = from_bytes(message.payload, dtype, message.shape)
            if _fits(exchange.into.get(peer), message, dtype):
                receive.tensor = exchange.into[peer].copy_(receive.tensor)
        else:
            self._begin(exchange, peer, message)
        if message.tag != SIGNATURE_ONLY:
            nbytes = math.prod(message.shape) * dtype.itemsize
            receive.request = self._channels.tracing.transfer(
                "receive", exchange.key, message.verb, peer, nbytes, begun, receive.request
            )
        answered = peer in exchange.targets - exchange.ring_targets and not message.weights
        if message.wants_ack and not answered:  # this rank's tensor acknowledges as well
            self._sends.put(peer, Ack(message.key))
        if message.mutual and not exchange.rows.get(peer):
            exchange.unacknowledged.discard(peer)

    def _begin(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        receive, dtype = exchange.receives[peer], getattr(torch, message.dtype)
        transport = self._sends.transport_for(exchange.streams)
        if exchange.peer_access and isinstance(transport, DirectReadTransport):
            imported = transport.import_tensor(message.shape, dtype, peer, message.tag)
            receive.import_request = receive.request = imported
            return
        receive.tensor = exchange.into.get(peer)
        if not _fits(receive.tensor, message, dtype):
            receive.tensor = empty_on(exchange.streams, message.shape, dtype)
        receive.request = transport.irecv(receive.tensor, peer, message.tag)

    def discard(self, peer: int, message: TensorMessage | ActiveMessage) -> None:
        """Receive and discard an unwanted tensor, so that its sender can proceed."""
        if message.payload is None and not self._begin_discard(peer, message):
            self._unwanted.append((peer, message))  # tried again later

    def _begin_discard(self, peer: int, message: TensorMessage | ActiveMessage) -> bool:
        """Begin to receive an unwanted tensor; False if that fails, as for lack of memory."""
        dtype = getattr(torch, message.dtype)
        on_host = getattr(message, "device", "cpu") == "cpu"
        try:
            transport = self._sends.transport_for(None if on_host else _DISCARD_STREAMS)
            if isinstance(transport, DirectReadTransport):
                import_request = transport.import_tensor(message.shape, dtype, peer, message.tag)
                import_request.release()
                self._discards.append((import_request, None))
            else:
                scratch = empty(message.shape, dtype)
                self._discards.append((transport.irecv(scratch, peer, message.tag), scratch))
        except TRANSFER_ERRORS:
            return False
        return True

    def discard_receive(self, receive: PendingReceive) -> None:
        """Discard the tensor of a failed exchange once it has been received."""
        if receive.request is not None:
            self._discards.append((receive.request, receive.tensor))

    def free_discards(self) -> None:
        """Free the buffers of received unwanted tensors, and retry receives that had failed."""
        if self._unwanted:
            self._unwanted = [one for one in self._unwanted if not self._begin_discard(*one)]
        if self._discards:
            self._discards = [pair for pair in self._discards if not has_ended(pair[0])]


def _fits(
    into: torch.Tensor | None, message: TensorMessage, dtype: torch.dtype
) -> TypeGuard[torch.Tensor]:
    """Return whether an announced tensor fits into a given tensor."""
    return into is not None and into.dtype is dtype and into.shape == torch.Size(message.shape)
