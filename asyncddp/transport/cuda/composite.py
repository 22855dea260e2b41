"""Composite GPU transport that sends to each peer by the transport that suits it best.

Inside a machine another transport may serve best than between machines, and a third one for
collectives. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.device.streams import DeviceStreams
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import DeviceTransport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport


class CompositeTransport(CudaStagedTransport):
    """Transport of GPU tensors that hands the messages to each peer to one of several transports.

    Collectives go to a transport of their own. What has no delegate is staged.

    Args:
        base: The transport for tensors on the host, between the same ranks.
        streams: The streams of the device.
    """

    name = "per_peer"

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        super().__init__(base, streams)
        self._staged = CudaStagedTransport(base, streams, self.pool)
        self._messages: Mapping[int, DeviceTransport] = {}
        self._collectives: DeviceTransport = self._staged

    @classmethod
    def combine(
        cls, opened: Mapping[str, DeviceTransport], peers: Mapping[int, str], collectives: str
    ) -> DeviceTransport:
        """Combine opened transports into one that chooses by peer; a single one is returned.

        Args:
            opened: The transports by name, one at least, between the same ranks.
            peers: For each peer the name of the transport of its messages.
            collectives: Name of the transport of collectives; these and messages are staged where
                it is not among ``opened``.
        """
        every = list(opened.values())
        if len(every) == 1:
            return every[0]
        own = [transport for transport in every if isinstance(transport, cls)]
        top = own[0] if own else cls(every[0].base, every[0].streams)
        delegates = {name: transport for name, transport in opened.items() if transport is not top}
        top._messages = {peer: delegates[name] for peer, name in peers.items() if name in delegates}
        top._collectives = delegates.get(collectives, top._staged)
        return top

    def for_subgroup(self, base: Transport) -> DeviceTransport | None:
        """Open the transport of collectives for a subgroup."""
        return self._collectives.for_subgroup(base)

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
        return self._messages.get(peer, self._staged).isend(data, peer, tag)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start a receive by the peer's transport."""
        return self._messages.get(peer, self._staged).irecv(out, peer, tag)

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
