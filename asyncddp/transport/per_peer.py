"""Several wires for tensors on GPUs at once: which one depends on the peer.

Inside a machine another wire may serve best than between machines, and a third one for what all
ranks do together. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import CudaStaged
from asyncddp.transport.one_device import OneDevice

__all__ = ["PerPeer"]


class PerPeer(OneDevice):
    """A wire for tensors on one device that leaves messages and collectives to others.

    What it leaves to none is staged.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
    """

    name = "per_peer"

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        super().__init__(base, streams)
        self._messages: Mapping[int, Transport] = {}
        self._collectives: Transport = CudaStaged(base, streams, self.pool)

    def leave_to(self, messages: Mapping[int, Transport], collectives: Transport | None) -> None:
        """Say who carries what; before anything is carried.

        Args:
            messages: Wires by peer; they are closed with this one.
            collectives: The wire of collectives, closed as well; None to stage them.
        """
        self._messages = dict(messages)
        self._collectives = self._collectives if collectives is None else collectives

    def split(self, color: int, key: int) -> Transport:
        """Split the wire of collectives."""
        return self._collectives.split(color, key)

    def close(self) -> None:
        """Close all wires."""
        for wire in {*self._messages.values(), self._collectives}:
            wire.close()
        super().close()

    # what goes by which wire

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """By the peer's wire."""
        wire = self._messages.get(peer)
        return super().isend(data, peer, tag) if wire is None else wire.isend(data, peer, tag)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """By the peer's wire."""
        wire = self._messages.get(peer)
        return super().irecv(out, peer, tag) if wire is None else wire.irecv(out, peer, tag)

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """By the wire of collectives."""
        return self._collectives.iallreduce(tensor, out, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """By the wire of collectives."""
        return self._collectives.ireduce_scatter(tensor, out, divisor)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """By the wire of collectives."""
        return self._collectives.ibroadcast(tensor, root)

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """By the wire of collectives."""
        return self._collectives.iallgather(tensor, out, counts)

    def ibarrier(self) -> Transfer:
        """By the wire of collectives, in its turn."""
        return self._collectives.ibarrier()
