"""Composite GPU transport that sends to each peer by the transport that suits it best.

Inside a machine another transport may serve best than between machines, and a third one for
collectives. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.device.streams import DeviceStreams
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.single_device import SingleDeviceTransport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport


class CompositeTransport(SingleDeviceTransport):
    """Transport for one device's tensors that delegates to one transport per peer.

    Collectives go to a transport of their own; messages without a delegate are staged.

    Args:
        base: The transport for tensors on the host, between the same ranks.
        streams: The streams of the device.
    """

    name = "per_peer"

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        super().__init__(base, streams)
        self._messages: Mapping[int, Transport] = {}
        self._collectives: Transport = CudaStagedTransport(base, streams, self.pool)

    def set_delegates(
        self, messages: Mapping[int, Transport], collectives: Transport | None
    ) -> None:
        """Set the transports to delegate to, before anything is sent.

        Args:
            messages: Transports by peer; they are closed with this one.
            collectives: The transport of collectives, closed as well; None to stage them.
        """
        self._messages = dict(messages)
        self._collectives = self._collectives if collectives is None else collectives

    def split(self, color: int, key: int) -> Transport:
        """Split the transport of collectives."""
        return self._collectives.split(color, key)

    def close(self) -> None:
        """Close all delegates and this transport."""
        for transport in {*self._messages.values(), self._collectives}:
            transport.close()
        super().close()

    # delegation

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Start a send by the peer's transport."""
        transport = self._messages.get(peer)
        return (
            super().isend(data, peer, tag)
            if transport is None
            else transport.isend(data, peer, tag)
        )

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start a receive by the peer's transport."""
        transport = self._messages.get(peer)
        return (
            super().irecv(out, peer, tag) if transport is None else transport.irecv(out, peer, tag)
        )

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Request:
        """Start an allreduce by the transport of collectives."""
        return self._collectives.iallreduce(tensor, out, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start a reduce-scatter by the transport of collectives."""
        return self._collectives.ireduce_scatter(tensor, out, divisor)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast by the transport of collectives."""
        return self._collectives.ibroadcast(tensor, root)

    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather by the transport of collectives."""
        return self._collectives.iallgather(tensor, out, counts)

    def ibarrier(self) -> Request:
        """Start a barrier by the transport of collectives."""
        return self._collectives.ibarrier()
