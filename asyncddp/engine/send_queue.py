"""Send queue: outgoing messages of one rank, bundled per peer, and the tensors they announce."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from asyncddp.device.streams import DeviceStreams
from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.messages import INLINE_BYTES, SIGNATURE_ONLY, Message, TensorMessage, encode
from asyncddp.engine.persistent_channels import ChannelTable
from asyncddp.engine.transfer_tracing import trace_transfer
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.timeline.tracer import Tracer
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.direct_read import DirectReadTransport
from asyncddp.transport.cuda.staged_transport import device_transport_for

_TAGS = 32768
_BYTES_AHEAD = 256 << 20  # bytes after which a sender waits: they may lie in the receiver's memory


class SendQueue:
    """Queue of one rank's outgoing messages and tensors over one transport.

    It is not thread-safe: the engine's lock guards it.

    Args:
        transport: The transport that carries messages, and tensors on the host.
        tracer: The timeline's tracer, if there is one.

    Attributes:
        channels: The rank's persistent channels.
    """

    def __init__(self, transport: Transport, tracer: Tracer | None = None) -> None:
        self._transport, self.tracer = transport, tracer
        self.channels = ChannelTable(transport.shared_memory_group, transport.rank, tracer)
        self._queued: dict[int, list[Message]] = defaultdict(list)
        self._unacknowledged_bytes: dict[int, int] = defaultdict(int)
        self._tag = 0

    def put(self, peer: int, message: Message) -> None:
        """Queue a message; it leaves with the next :meth:`flush`."""
        self._queued[peer].append(message)

    def flush(self) -> bool:
        """Send the queued messages, one bundle for each peer, and tell whether there were any."""
        if not self._queued:
            return False
        queued, self._queued = self._queued, defaultdict(list)
        for peer, messages in queued.items():
            self._transport.post(peer, encode(messages))
        return True

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor as part of an open exchange."""
        inline = tensor.nbytes <= INLINE_BYTES and exchange.streams is None
        begun = 0 if self.tracer is None else time.monotonic_ns()
        tag = self._announce(exchange, peer, tensor, inline=inline)
        sent: Request | None = None
        if not inline:
            self.flush()  # else the announcement would queue behind the bytes
            sent = self._transport_for(exchange.streams).isend(tensor, peer, tag)
        self._track(exchange, peer, tensor.nbytes, begun, sent)

    def export(
        self,
        exchange: ExchangeRequest,
        peers: Sequence[int],
        tensor: torch.Tensor,
        factor: float = 1.0,
        *,
        lasting: bool,
    ) -> None:
        """Let peers read a multiple of a contiguous device tensor in this rank's memory.

        Where the transport cannot do that, the tensor is sent like any other.

        Args:
            exchange: The exchange.
            peers: Ranks that read the tensor.
            tensor: The tensor.
            factor: The factor that multiplies it.
            lasting: Whether the tensor stays unchanged until the exchange is over.
        """
        transport = self._transport_for(exchange.streams)
        if not isinstance(transport, DirectReadTransport):
            sent = tensor if factor == 1.0 else tensor * factor
            for peer in peers:
                self.send(exchange, peer, sent)
            return
        begun = 0 if self.tracer is None else time.monotonic_ns()
        tags = {peer: self._announce(exchange, peer, tensor, inline=False) for peer in peers}
        self.flush()
        exports = transport.export_tensor(tensor, tags, factor=factor, lasting=lasting)
        for peer, export in exports.items():
            exchange.exports.append(export)
            self._track(exchange, peer, tensor.nbytes, begun, export)

    def _announce(
        self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor, *, inline: bool
    ) -> int:
        """Queue the header of a tensor, with its bytes if inline, and return its tag."""
        tag = self._next_tag()
        self._unacknowledged_bytes[peer] += tensor.nbytes
        if self._unacknowledged_bytes[peer] > _BYTES_AHEAD:
            self._unacknowledged_bytes[peer] = 0
            if peer not in exchange.receives or not exchange.receives[peer].announced:
                exchange.unacknowledged.add(peer)  # else its tensor, already here, acknowledged
        self.put(
            peer,
            TensorMessage(
                key=exchange.key,
                verb=exchange.signature.verb,
                dtype=exchange.signature.dtype,
                shape=tuple(tensor.shape),
                payload=as_bytes(tensor).numpy().tobytes() if inline else None,
                tag=tag,
                wants_ack=peer in exchange.unacknowledged,
                mutual=peer in exchange.receives,
                send_ring=self.channels.ring_to_offer(exchange.channel, peer),
                device=exchange.signature.device,
                weights=exchange.rows.get(peer, ""),
            ),
        )
        return tag

    def _track(
        self,
        exchange: ExchangeRequest,
        peer: int,
        nbytes: int,
        begun: int,
        sent: Request | None,
    ) -> None:
        """Add a send to the exchange, and to the timeline if there is one."""
        if self.tracer is not None:
            sent = trace_transfer(self.tracer, "send", exchange, peer, nbytes, begun, sent)
        exchange.sends += [] if sent is None else [sent]

    def _transport_for(self, streams: DeviceStreams | None) -> Transport:
        """Return the transport for tensors of a device, or of the host."""
        return (
            self._transport if streams is None else device_transport_for(self._transport, streams)
        )

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def announce(self, exchange: ExchangeRequest, peer: int) -> None:
        """Queue the signature of an exchange, without a tensor."""
        signature = exchange.signature
        shape = tuple(0 if size is None else size for size in signature.shape)
        wants_ack = peer in exchange.unacknowledged
        mutual = peer in exchange.receives
        message = TensorMessage(
            exchange.key,
            signature.verb,
            signature.dtype,
            shape,
            b"",
            SIGNATURE_ONLY,
            wants_ack,
            mutual,
        )
        self.put(
            peer,
            message
            if signature.device == "cpu"
            else msgspec.structs.replace(message, device=signature.device),
        )
