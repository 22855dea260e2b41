"""Composite GPU transport, which uses the most suitable transport for each peer.

Inside a machine another transport may serve best than between machines, and a third one for
collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import StreamRole, empty_on
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import (
    DeviceTransport,
    DirectReadReceiveRequest,
    DirectReadSendRequest,
    DirectReadTransport,
    forward_to,
)
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport


class _WholeTransfer:
    """Send or receive of a whole tensor, for a peer whose transport cannot read in place."""

    def __init__(self, transfer: Request, tensor: torch.Tensor) -> None:
        self.tensor, self.done, self.abandon = tensor, transfer.done, transfer.abandon
        self.reusable = transfer.done

    def release(self) -> None:
        """Do nothing: the peer has sent its tensor and does not wait for a release."""


class CompositeTransport(DeviceTransport, DirectReadTransport):
    """Composite transport: forwards each GPU message to the transport chosen for its peer.

    Collectives are forwarded to a separate transport. Without a chosen transport, tensors are
    staged. Peers whose transport cannot read in place are sent whole tensors.
    """

    def __init__(
        self, opened: Mapping[str, DeviceTransport], peers: Mapping[int, str], collectives: str
    ) -> None:
        first = next(iter(opened.values()))
        super().__init__(first.base, first.streams)
        self.name = "+".join(opened)
        self._staged = CudaStagedTransport(self.base, self.streams)
        self._delegates = (*opened.values(), self._staged)
        self._messages = {peer: opened[name] for peer, name in peers.items() if name in opened}
        self._collectives = opened.get(collectives, self._staged)

    @classmethod
    def combine(
        cls, opened: Mapping[str, DeviceTransport], peers: Mapping[int, str], collectives: str
    ) -> DeviceTransport:
        """Combine opened transports into one that chooses by peer.

        ``peers`` and ``collectives`` name transports; one that is not opened is replaced by
        staging. A single transport that serves all peers is returned itself: it stages
        collectives that it cannot do.
        """
        if len(opened) == 1 and opened.keys() >= set(peers.values()):
            return next(iter(opened.values()))
        return cls(opened, peers, collectives)

    def transport_to(self, peer: int) -> DeviceTransport:
        """Return the transport for messages to a peer."""
        return self._messages.get(peer, self._staged)

    @override
    def close(self) -> None:
        for transport in self._delegates:
            transport.close()

    @override
    def watch(self, timeout: float) -> object:
        return [transport.watch(timeout) for transport in self._delegates]

    @override
    def connect(self, peers: Iterable[int]) -> None:
        for peer in peers:
            self.transport_to(peer).connect([peer])

    @override
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        return self.transport_to(peer).isend(data, peer, tag)

    @override
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        return self.transport_to(peer).irecv(out, peer, tag)

    @override
    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float = 1.0
    ) -> Mapping[int, DirectReadSendRequest]:
        chosen = {peer: self.transport_to(peer) for peer in tags}
        if factor != 1.0 and not all(isinstance(t, DirectReadTransport) for t in chosen.values()):
            with self.streams.stream_context(StreamRole.COMPUTE):
                data, factor = data * factor, 1.0
        requests: dict[int, DirectReadSendRequest] = {}
        for transport in dict.fromkeys(chosen.values()):
            near = {peer: tag for peer, tag in tags.items() if chosen[peer] is transport}
            if isinstance(transport, DirectReadTransport):
                requests.update(transport.export_tensor(data, near, factor))
                continue
            for peer, tag in near.items():
                requests[peer] = _WholeTransfer(transport.isend(data, peer, tag), data)
        return requests

    @override
    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> DirectReadReceiveRequest:
        transport = self.transport_to(peer)
        if isinstance(transport, DirectReadTransport):
            return transport.import_tensor(shape, dtype, peer, tag)
        whole = empty_on(self.streams, shape, dtype)
        return _WholeTransfer(transport.irecv(whole, peer, tag), whole)

    iallreduce = forward_to("_collectives", Transport.iallreduce)
    ireduce_scatter = forward_to("_collectives", Transport.ireduce_scatter)
    ibroadcast = forward_to("_collectives", Transport.ibroadcast)
    iallgather = forward_to("_collectives", Transport.iallgather)
    ibarrier = forward_to("_collectives", Transport.ibarrier)
    for_subgroup = forward_to("_collectives", DeviceTransport.for_subgroup)
