"""Exchange request: one rank's sends and receives for one call, with their wait conditions.

Nothing in here communicates: the matcher and the send queue store the requests of transfers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.engine.messages import ExchangeSignature, MatchKey, TensorMessage
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.tensors.byte_views import has_plain_memory
from asyncddp.transport.base import SHORT_BYTES, Request
from asyncddp.transport.cuda.device_transport import DirectReadReceiveRequest, DirectReadSendRequest


class ExpectedMessage(Protocol):
    """Interface of a receive that expects one message, outside of any exchange request."""

    def receive(self, peer: int, message: TensorMessage) -> bool:
        """Receive the message of the expected key; if impossible, open a request: False."""
        ...

    def hand_over(self) -> None:
        """Open an exchange request that replaces this receive."""
        ...


class ShortMessage(NamedTuple):
    """Short tensor sent to one rank, or received from it, within a single message.

    Attributes:
        signature: Signature of the tensor.
        peer: The other rank.
        tensor: The tensor to send, or to receive into; None to receive a new tensor.
        receives: True if this rank receives.
    """

    signature: ExchangeSignature
    peer: int
    tensor: torch.Tensor | None
    receives: bool

    @staticmethod
    def of(
        signature: ExchangeSignature,
        peer: int,
        tensor: torch.Tensor | None,
        *,
        receives: bool = False,
    ) -> ShortMessage | None:
        """Return a tensor's short message; None unless it is short, contiguous and on the CPU."""
        if signature.device != "cpu":
            return None
        if tensor is not None and (
            tensor.nbytes > SHORT_BYTES
            or not has_plain_memory(tensor)
            or (receives and tensor.is_inference())
        ):
            return None
        return ShortMessage(signature, peer, tensor, receives)


class PendingReceive:
    """Pending receive of a peer's tensor; also the wait condition until the tensor can be read."""

    def __init__(self, exchange: ExchangeRequest, peer: int) -> None:
        self.exchange, self.peer = exchange, peer
        self.tensor: torch.Tensor | None = None  # the buffer that holds it, or will
        self.request: Request | None = None  # the transport's, which fills the buffer
        self.import_request: DirectReadReceiveRequest | None = None  # to read it in place
        self.left = False  # whether the peer has left before its whole tensor was here

    def leave_out(self) -> None:
        """Stop waiting for a peer that has left, unless its whole tensor is here."""
        self.left = True
        with suppress(PeerLeftError):
            self.left = not (self.announced and (self.request is None or self.request.done()))

    @property
    def announced(self) -> bool:
        """True if the peer has announced the tensor."""
        return self.tensor is not None or self.import_request is not None

    def done(self) -> bool:
        """Return whether the tensor can be read, or its rank was left out; raise if it failed."""
        self.exchange.raise_if_failed()
        if self.left:
            return True
        return self.announced and (
            self.request is None or self.exchange.has_completed(self.request)
        )

    def take(self) -> torch.Tensor:
        """Return the tensor; call it only once done."""
        if self.import_request is not None:
            return self.import_request.tensor
        if self.tensor is None:
            raise RuntimeError("a pending receive was taken before it was done")
        return self.tensor

    def release(self) -> None:
        """Release a tensor in the peer's memory after this rank's reads, so that it may change."""
        if self.import_request is not None:
            self.import_request.release()

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peer and match key, as long as the peer has announced nothing."""
        return [] if self.announced else [(self.peer, self.exchange.key)]


class ExchangeRequest:
    """One rank's request for an exchange: receives from sources, and sends to targets.

    Peers match it by its key, and must agree on its signature. With ``peer_access``, tensors are
    read in the peers' own memory if the transport can do that, and each pending receive must be
    released afterwards.
    """

    def __init__(
        self,
        key: MatchKey,
        signature: ExchangeSignature,
        sources: Iterable[int],
        targets: Iterable[int],
        *,
        peer_access: bool = False,
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.key, self.signature, self.peer_access = key, signature, peer_access
        self.into = into or {}  # contiguous tensors that receive, by source
        self.receives = {peer: PendingReceive(self, peer) for peer in sources}
        self.targets = frozenset(targets)
        self.unacknowledged: set[int] = set()  # targets whose acknowledgement is awaited
        self.sends: list[tuple[int, Request]] = []  # by target, not known to be complete
        self.exports: list[DirectReadSendRequest] = []  # peers read them in place
        self.ring_targets: frozenset[int] = frozenset()  # they read this rank's shared-memory ring
        self.channel: PersistentChannel | None = None  # of this name and signature
        self.streams: DeviceStreams | None = None  # of the tensors' device; None on the host
        self.row = ""  # this rank's row of W, where it is compared
        self.rows: Mapping[int, str] = {}  # the row that each target should have
        self.audience: frozenset[int] = frozenset()  # further ranks to tell if the exchange fails
        self.tolerates_loss = False  # whether it goes on without peers that have left
        self.left_out: set[int] = set()  # peers that have left
        self.error: PeerError | None = None
        self.reason = ""

    def has_completed(self, request: Request) -> bool:
        """Test a transfer; where a loss is tolerated, one with a peer that has left just waits."""
        try:
            return request.done()
        except PeerLeftError:
            if not self.tolerates_loss:
                raise
            return False  # until the peer is left out

    def leave_out(self, peer: int) -> None:
        """Neither send to a peer that has left nor wait for it."""
        self.left_out.add(peer)
        self.unacknowledged.discard(peer)
        if peer in self.receives:
            self.receives[peer].leave_out()
        for target, request in self.sends:
            if target == peer:
                request.abandon()
        self.sends = [sent for sent in self.sends if sent[0] != peer]

    def fail(self, error: PeerError, reason: str) -> None:
        """Mark this exchange as failed, unless it has failed before; peers are sent the reason."""
        if self.error is None:
            self.error, self.reason = error, reason

    def raise_if_failed(self) -> None:
        """Raise the error of this exchange if it has failed."""
        if self.error is not None:
            raise self.error

    def row_difference(self, message: TensorMessage) -> str | None:
        """Describe how the sender's mixing weights differ from this rank's; None if equal."""
        if not self.row or not message.weights or message.weights == self.row:
            return None
        return (
            f"expected mixing weights {self.row}, got {message.weights} by the sender's topology; "
            "set the same topology, with the same weights, on all ranks"
        )

    @property
    def sources(self) -> frozenset[int]:
        """Ranks from which a tensor is expected."""
        return frozenset(self.receives)

    def sent(self) -> SendCompletionCondition:
        """Return the wait condition that all sends are complete, and acknowledged if required."""
        return SendCompletionCondition(self)


class SendCompletionCondition:
    """Wait condition: all sends of an exchange are complete, and acknowledged if required."""

    def __init__(self, exchange: ExchangeRequest) -> None:
        self.exchange = exchange

    def done(self) -> bool:
        """Return whether all sends are complete and no acknowledgement is missing."""
        exchange = self.exchange
        exchange.raise_if_failed()
        if exchange.sends and all([exchange.has_completed(sent) for _, sent in exchange.sends]):
            exchange.sends.clear()
        return not exchange.sends and not exchange.unacknowledged

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peers that have not acknowledged or received yet."""
        exchange = self.exchange
        peers = exchange.unacknowledged or {peer for peer, _ in exchange.sends}
        return [(peer, exchange.key) for peer in sorted(peers)]


class BufferReuseWaitCondition(SendCompletionCondition):
    """Wait condition: later work on the device stream may overwrite the sent buffers."""

    @override
    def done(self) -> bool:
        exchange = self.exchange
        if not exchange.exports:
            return super().done()
        exchange.raise_if_failed()
        return all([export.reusable() for export in exchange.exports])


class ExchangeRecord(NamedTuple):
    """Record of a finished exchange: source and target ranks, error if any, dtype and shape."""

    sources: frozenset[int]
    targets: frozenset[int]
    error: PeerError | None
    signature: ExchangeSignature | None = None


def contradiction(
    exchange: ExchangeRequest, peer: int, message: TensorMessage
) -> tuple[str | None, str]:
    """Describe how a message contradicts a request, for this rank and its sender; None if it fits.

    Ranks that call different collectives under one key may also exchange with different peers.
    """
    expected, collective = peer in exchange.receives, exchange.key.collective
    if expected or collective:
        problem = exchange.signature.difference(message)
        if problem is None and expected:
            problem = exchange.row_difference(message)
        if problem is not None or expected:
            return problem, f"{problem} from rank {peer}"
    if collective:
        problem = (
            f"expected a form from rank {sorted(exchange.sources)} alone, got one from rank "
            f"{peer}; give check=, or ASYNCDDP_CHECK, alike on all ranks"
        )
    else:
        problem = f"expected nothing from rank {peer}, got a tensor: {describe_neighbors(exchange)}"
    return problem, problem


def describe_neighbors(exchange: ExchangeRequest | ExchangeRecord) -> str:
    """Describe an exchange's sources and targets, and how to make ranks name each other."""
    return (
        f"it receives from {sorted(exchange.sources)} and sends to {sorted(exchange.targets)}; let "
        "the sender's dst_weights and the receiver's src_weights name each other"
    )
