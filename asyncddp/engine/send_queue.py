"""Send queue: bundles a rank's outgoing messages per peer, and sends their tensors."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.messages import (
    SIGNATURE_ONLY,
    ExchangeSignature,
    MatchKey,
    Message,
    TensorMessage,
    encode,
)
from asyncddp.engine.persistent_channels import PersistentChannelTable
from asyncddp.tensors.byte_views import to_bytes
from asyncddp.transport.base import SHORT_BYTES, Request, Transport
from asyncddp.transport.cuda.device_transport import DirectReadTransport
from asyncddp.transport.cuda.staged_transport import device_transport_for

_TAGS = 32768
_BYTES_AHEAD = 256 << 20  # bytes after which a sender waits: they may lie in the receiver's memory


class SendQueue:
    """Queue of one rank's outgoing messages and tensors, guarded by the progress engine's lock."""

    def __init__(self, transport: Transport, channels: PersistentChannelTable) -> None:
        self._transport, self._channels, self._tracing = transport, channels, channels.tracing
        self._queued: dict[int, list[Message]] = defaultdict(list)
        self._unacknowledged_bytes: dict[int, int] = defaultdict(int)
        self._tag = 0

    def put(self, peer: int, message: Message) -> None:
        """Queue a message for the next :meth:`flush`."""
        self._queued[peer].append(message)

    def flush(self) -> bool:
        """Send the queued messages, one bundle per peer; return whether there were any."""
        if not self._queued:
            return False
        queued, self._queued = self._queued, defaultdict(list)
        for peer, messages in queued.items():
            self._transport.post(peer, encode(messages))
        return True

    def next_tag(self) -> int:
        """Return the tag for the next tensor that follows its header."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def transport_for(self, streams: DeviceStreams | None) -> Transport:
        """Return the transport for tensors of a device, or of the host if ``streams`` is None."""
        if streams is None:
            return self._transport
        return device_transport_for(self._transport, streams)

    def announce(self, exchange: ExchangeRequest, peer: int) -> None:
        """Queue a message with the signature of an exchange, without a tensor."""
        shape = tuple(size or 0 for size in exchange.signature.shape)
        self._put_header(exchange, peer, shape, b"", SIGNATURE_ONLY)

    def post_short(
        self, key: MatchKey, signature: ExchangeSignature, peer: int, payload: bytes
    ) -> bool:
        """Send a tensor's bytes within its header; False if too many bytes are unacknowledged."""
        ahead = self._unacknowledged_bytes[peer] + len(payload)
        if ahead > _BYTES_AHEAD:
            return False
        self._unacknowledged_bytes[peer] = ahead
        shape = tuple(size or 0 for size in signature.shape)
        form = signature.verb, signature.dtype, shape
        self.put(peer, TensorMessage(key, *form, payload, self.next_tag()))
        self.flush()
        return True

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor as part of an open exchange, unless the peer has left."""
        if peer in exchange.left_out:
            return
        inline = tensor.nbytes <= SHORT_BYTES and exchange.streams is None
        begun = time.monotonic_ns()
        tag = self._announce_tensor(exchange, peer, tensor, inline=inline)
        sent: Request | None = None
        if not inline:
            self.flush()  # else the announcement would queue behind the bytes
            sent = self.transport_for(exchange.streams).isend(tensor, peer, tag)
        self._track(exchange, peer, tensor.nbytes, begun, sent)

    def export(
        self,
        exchange: ExchangeRequest,
        peers: Sequence[int],
        tensor: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        """Export a multiple of a contiguous device tensor, which peers read in this rank's memory.

        If the transport cannot do that, the tensor is sent as usual.
        """
        transport = self.transport_for(exchange.streams)
        peers = [peer for peer in peers if peer not in exchange.left_out]
        if not isinstance(transport, DirectReadTransport):
            sent = tensor if factor == 1.0 else tensor * factor
            for peer in peers:
                self.send(exchange, peer, sent)
            return
        begun = time.monotonic_ns()
        tags = {peer: self._announce_tensor(exchange, peer, tensor, inline=False) for peer in peers}
        self.flush()
        exports = transport.export_tensor(tensor, tags, factor)
        for peer, export in exports.items():
            exchange.exports.append(export)
            self._track(exchange, peer, tensor.nbytes, begun, export)

    def _announce_tensor(
        self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor, *, inline: bool
    ) -> int:
        """Queue the header of a tensor, with its bytes if ``inline``; return its tag."""
        tag = self.next_tag()
        self._unacknowledged_bytes[peer] += tensor.nbytes
        if self._unacknowledged_bytes[peer] > _BYTES_AHEAD:
            self._unacknowledged_bytes[peer] = 0
            if peer not in exchange.receives or not exchange.receives[peer].announced:
                exchange.unacknowledged.add(peer)  # else its tensor, already here, acknowledged
        payload = to_bytes(tensor) if inline else None
        self._put_header(exchange, peer, tuple(tensor.shape), payload, tag)
        return tag

    def _put_header(
        self,
        exchange: ExchangeRequest,
        peer: int,
        shape: tuple[int, ...],
        payload: bytes | None,
        tag: int,
    ) -> None:
        signature = exchange.signature
        message = TensorMessage(
            key=exchange.key,
            verb=signature.verb,
            dtype=signature.dtype,
            shape=shape,
            payload=payload,
            tag=tag,
            wants_ack=peer in exchange.unacknowledged,
            mutual=peer in exchange.receives,
            send_ring=self._channels.ring_to_offer(exchange.channel, peer),
            device=signature.device,
            weights=exchange.rows.get(peer, ""),
            members=signature.members,
        )
        self.put(peer, message)

    def _track(
        self, exchange: ExchangeRequest, peer: int, nbytes: int, begun: int, sent: Request | None
    ) -> None:
        key, verb = exchange.key, exchange.signature.verb
        sent = self._tracing.transfer("send", key, verb, peer, nbytes, begun, sent)
        if sent is not None:
            exchange.sends.append((peer, sent))
