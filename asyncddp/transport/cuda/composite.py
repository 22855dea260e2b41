"""Composite GPU transport that sends to each peer by the transport that suits it best.

Inside a machine another transport may serve best than between machines, and a third one for
collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import DeviceTransport, forward_to
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport


class CompositeTransport(DeviceTransport):
    """Transport of GPU tensors that forwards each message to the transport chosen for its peer.

    Collectives go to a transport of their own. What has no delegate is staged.
    """

    name = "per_peer"

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        super().__init__(base, streams)
        self._staged = CudaStagedTransport(base, streams)
        self._messages: Mapping[int, DeviceTransport] = {}
        self._collectives: DeviceTransport = self._staged

    @classmethod
    def combine(
        cls, opened: Mapping[str, DeviceTransport], peers: Mapping[int, str], collectives: str
    ) -> DeviceTransport:
        """Combine opened transports into one that chooses by peer; a single one is returned.

        ``peers`` and ``collectives`` name transports; what goes by one not opened is staged.
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

    @property
    def _delegates(self) -> set[DeviceTransport]:
        return {*self._messages.values(), self._collectives, self._staged}

    @override
    def close(self) -> None:
        for transport in self._delegates:
            transport.close()
        super().close()

    @override
    def watch(self, timeout: float) -> object:
        return [transport.watch(timeout) for transport in self._delegates]

    @override
    def connect(self, peers: Iterable[int]) -> None:
        for peer in self._messages.keys() & set(peers):
            self._messages[peer].connect([peer])

    @override
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        return self._messages.get(peer, self._staged).isend(data, peer, tag)

    @override
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        return self._messages.get(peer, self._staged).irecv(out, peer, tag)

    iallreduce = forward_to("_collectives", Transport.iallreduce)
    ireduce_scatter = forward_to("_collectives", Transport.ireduce_scatter)
    ibroadcast = forward_to("_collectives", Transport.ibroadcast)
    iallgather = forward_to("_collectives", Transport.iallgather)
    ibarrier = forward_to("_collectives", Transport.ibarrier)
    for_subgroup = forward_to("_collectives", DeviceTransport.for_subgroup)
