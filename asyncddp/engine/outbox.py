"""What one rank sends: bundles of messages, and tensors by the wire of their device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from asyncddp.engine.channels import Channels
from asyncddp.engine.messages import FORM, Data, Message, encode
from asyncddp.engine.posting import Posting
from asyncddp.engine.recorded import noted
from asyncddp.memory.streams import DeviceStreams
from asyncddp.memory.views import as_bytes
from asyncddp.timeline.recorder import Recorder
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import on_device
from asyncddp.transport.lending import Lending

__all__ = ["Outbox"]

_INLINE = 16 * 1024  # bytes of a tensor that travel inside the message
_TAGS = 32768
_BYTES_AHEAD = 256 << 20  # bytes after which a sender waits: they may lie in the receiver's memory


class Outbox:
    """What leaves one rank over one transport. Not thread-safe: the engine's lock guards it.

    Args:
        transport: The wire.
        recorder: Takes notes for the timeline, if there is one.
    """

    def __init__(self, transport: Transport, recorder: Recorder | None = None) -> None:
        self._transport, self.recorder = transport, recorder
        self.channels = Channels(transport.neighborhood, transport.rank, recorder)
        self._outbox: dict[int, list[Message]] = defaultdict(list)
        self._ahead: dict[int, int] = defaultdict(int)
        self._tag = 0

    def put(self, peer: int, message: Message) -> None:
        """Queue a message; it leaves with the next :meth:`flush`."""
        self._outbox[peer].append(message)

    def flush(self) -> bool:
        """Send what is queued, one bundle for each peer; whether anything was."""
        if not self._outbox:
            return False
        outbox, self._outbox = self._outbox, defaultdict(list)
        for peer, messages in outbox.items():
            self._transport.post(peer, encode(messages))
        return True

    def send(self, posting: Posting, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor as part of an open exchange."""
        inline = tensor.nbytes <= _INLINE and posting.streams is None
        begun = 0 if self.recorder is None else time.monotonic_ns()
        tag = self._tell(posting, peer, tensor, inline=inline)
        sent: Transfer | None = None
        if not inline:
            self.flush()  # else the announcement would queue behind the bytes
            sent = self._wire(posting.streams).isend(tensor, peer, tag)
        self._departs(posting, peer, tensor.nbytes, begun, sent)

    def show(
        self,
        posting: Posting,
        peers: Sequence[int],
        tensor: torch.Tensor,
        factor: float = 1.0,
        *,
        lasting: bool,
    ) -> None:
        """Send a multiple of a contiguous tensor on a device to peers, to be read where it lies.

        Where the wire does not offer that, it is sent like any other.

        Args:
            posting: The exchange.
            peers: To whom.
            tensor: The tensor.
            factor: With which it is multiplied.
            lasting: Whether it stays as it is until the exchange is over.
        """
        wire = self._wire(posting.streams)
        if not isinstance(wire, Lending):
            sent = tensor if factor == 1.0 else tensor * factor
            for peer in peers:
                self.send(posting, peer, sent)
            return
        begun = 0 if self.recorder is None else time.monotonic_ns()
        tags = {peer: self._tell(posting, peer, tensor, inline=False) for peer in peers}
        self.flush()
        for peer, lent in wire.ilend(tensor, tags, factor=factor, lasting=lasting).items():
            posting.lent.append(lent)
            self._departs(posting, peer, tensor.nbytes, begun, lent)

    def _tell(self, posting: Posting, peer: int, tensor: torch.Tensor, *, inline: bool) -> int:
        """Announce a tensor, or send it with that; the tag under which it travels."""
        tag = self._next_tag()
        self._ahead[peer] += tensor.nbytes
        if self._ahead[peer] > _BYTES_AHEAD:
            self._ahead[peer] = 0
            if peer not in posting.arrivals or not posting.arrivals[peer].heard:
                posting.unconfirmed.add(peer)  # else its tensor is here, and has said it
        self.put(
            peer,
            Data(
                key=posting.key,
                verb=posting.form.verb,
                dtype=posting.form.dtype,
                shape=tuple(tensor.shape),
                payload=as_bytes(tensor).numpy().tobytes() if inline else None,
                tag=tag,
                confirm=peer in posting.unconfirmed,
                mutual=peer in posting.arrivals,
                lane=self.channels.offer(posting.channel, peer),
                device=posting.form.device,
                weights=posting.rows.get(peer, ""),
            ),
        )
        return tag

    def _departs(
        self,
        posting: Posting,
        peer: int,
        nbytes: int,
        begun: int,
        sent: Transfer | None,
    ) -> None:
        """Wait for what carries a tensor, and note it in the timeline if there is one."""
        if self.recorder is not None:
            sent = noted(self.recorder, "send", posting, peer, nbytes, begun, sent)
        posting.departures += [] if sent is None else [sent]

    def _wire(self, streams: DeviceStreams | None) -> Transport:
        """What carries tensors of a device, or of the host."""
        return self._transport if streams is None else on_device(self._transport, streams)

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def announce(self, posting: Posting, peer: int) -> None:
        """Send an open exchange's form alone."""
        form = posting.form
        shape = tuple(0 if size is None else size for size in form.shape)
        confirm = peer in posting.unconfirmed
        mutual = peer in posting.arrivals
        data = Data(posting.key, form.verb, form.dtype, shape, b"", FORM, confirm, mutual)
        self.put(
            peer,
            data if form.device == "cpu" else msgspec.structs.replace(data, device=form.device),
        )
