"""Wires that are opened for one device of a rank, whose memory or name its peers know."""

from __future__ import annotations

import torch

from asyncddp.errors import ArgumentError
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transport
from asyncddp.transport.cuda_staged import CudaStaged

__all__ = ["OneDevice"]


class OneDevice(CudaStaged):
    """A wire for tensors on one device, and on the host for what is dropped."""

    def for_device(self, streams: DeviceStreams) -> Transport:
        """This wire.

        Raises:
            ArgumentError: Another device of this rank.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, for which {self.name} "
            f"was opened, got one on {streams.device}; use the GPU of that number, local_rank() "
            "modulo the visible ones, or leave ASYNCDDP_DEVICE_WIRES unset"
        )
