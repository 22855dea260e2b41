"""One-sided messages: they reach a service of a peer, which nobody there has to ask for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from asyncddp.engine.messages import UNREADABLE, Facts, Message, Parcel
from asyncddp.errors import AsyncDDPError, PeerError
from asyncddp.memory.allocate import empty
from asyncddp.memory.views import as_bytes, from_bytes
from asyncddp.transport.contract import Transfer, Transport

__all__ = ["Parcels", "Service"]

Service: TypeAlias = Callable[[int, tuple[Any, ...], torch.Tensor | None], None]
"""Takes the sender, what it says, and a tensor of its own that may have come along."""

_INLINE = 16 * 1024  # bytes of a tensor that travel inside the message
_Coming: TypeAlias = tuple[Parcel, torch.Tensor | None, Transfer | None]


class Parcels:
    """What one rank sends to and takes for services. The engine's lock guards it.

    Args:
        transport: The wire.
        put: Queues a message for a peer.
        flush: Sends what is queued.
        tag: Gives a number for a tensor that follows its message.
        complain: Hears of a parcel that its service could not take.
    """

    def __init__(
        self,
        transport: Transport,
        put: Callable[[int, Message], None],
        flush: Callable[[], bool],
        tag: Callable[[], int],
        complain: Callable[[PeerError], None],
    ) -> None:
        self._transport, self._put, self._flush, self._tag = transport, put, flush, tag
        self._complain = complain
        self.services: dict[str, Service] = {}
        """Who takes what is addressed to a name, on whichever thread drives the engine."""
        self._leaving: list[tuple[Transfer, torch.Tensor]] = []
        self._coming: dict[int, deque[_Coming]] = {}

    @property
    def busy(self) -> bool:
        """Whether tensors are on their way."""
        return bool(self._coming or self._leaving)

    def send(
        self, peer: int, service: str, content: Facts, tensor: torch.Tensor | None = None
    ) -> None:
        """Send what a service of a peer will take; the call never waits.

        Args:
            peer: To whom.
            service: Its name there.
            content: Numbers, strings and None.
            tensor: A contiguous CPU tensor, left alone until the peer is known to have it.
        """
        if tensor is None:
            self._put(peer, Parcel(service, content, "", (), None, -1))
            return
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        raw = as_bytes(tensor)
        if raw.numel() <= _INLINE:
            data = raw.numpy().tobytes()
            self._put(peer, Parcel(service, content, dtype, shape, data, -1))
            return
        tag = self._tag()
        self._put(peer, Parcel(service, content, dtype, shape, None, tag))
        self._flush()  # else the announcement would queue behind the bytes
        self._leaving.append((self._transport.isend(tensor, peer, tag), tensor))

    def receive(self, peer: int, parcel: Parcel) -> None:
        """Take a parcel, or begin to."""
        tensor: torch.Tensor | None = None
        transfer: Transfer | None = None
        if parcel.dtype:
            dtype = getattr(torch, parcel.dtype)
            if parcel.payload is not None:
                tensor = from_bytes(parcel.payload, dtype, parcel.shape)
            else:
                tensor = empty(parcel.shape, dtype)
                transfer = self._transport.irecv(tensor, peer, parcel.tag)
        self._coming.setdefault(peer, deque()).append((parcel, tensor, transfer))
        self._deliver(peer)

    def progress(self) -> bool:
        """Deliver what has come, each peer's in its order; whether anything was."""
        if self._leaving:
            self._leaving = [pair for pair in self._leaving if not _over(pair[0])]
        return any([self._deliver(peer) for peer in list(self._coming)])

    def close(self) -> None:
        """Give up what is on its way, and forget the services."""
        coming = [transfer for waiting in self._coming.values() for _, _, transfer in waiting]
        for transfer in (*(transfer for transfer, _ in self._leaving), *coming):
            if transfer is not None and not _over(transfer):
                transfer.abandon()
        self._leaving.clear()
        self._coming.clear()
        self.services.clear()

    def _deliver(self, peer: int) -> bool:
        waiting, delivered = self._coming[peer], False
        while waiting and (waiting[0][2] is None or self._whole(waiting[0][2], waiting)):
            parcel, tensor, _ = waiting.popleft()
            delivered = True
            service = self.services.get(parcel.service)
            if service is not None:
                self._serve(service, peer, parcel, tensor)
        if not waiting:
            del self._coming[peer]
        return delivered

    def _serve(
        self, service: Service, peer: int, parcel: Parcel, tensor: torch.Tensor | None
    ) -> None:
        """Hand a parcel over; whoever drives the engine just now is not to blame if it fails."""
        try:
            service(peer, parcel.content, tensor)
        except (AsyncDDPError, *UNREADABLE) as error:
            problem = f"what rank {peer} sent to {parcel.service} could not be taken"
            failure = PeerError(f"{problem}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._complain(failure)

    def _whole(self, transfer: Transfer, waiting: deque[_Coming]) -> bool:
        """Whether a tensor has come; of a peer that failed meanwhile nothing more will."""
        try:
            return transfer.done()
        except PeerError:
            waiting.clear()
            return False


def _over(transfer: Transfer) -> bool:
    """Whether a transfer has ended, well or not."""
    try:
        return transfer.done()
    except PeerError:
        return True
