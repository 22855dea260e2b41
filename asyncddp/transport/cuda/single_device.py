"""Base class of GPU transports that serve a single device of their rank."""

from __future__ import annotations

import torch

from asyncddp.device.streams import DeviceStreams
from asyncddp.errors import ArgumentError
from asyncddp.transport.base import Transport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport


class SingleDeviceTransport(CudaStagedTransport):
    """Transport for the tensors of one device; on the host it only receives dropped messages."""

    def for_device(self, streams: DeviceStreams) -> Transport:
        """Return this transport, if it serves the device.

        Raises:
            ArgumentError: It serves another device of this rank.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, for which {self.name} "
            f"was opened, got one on {streams.device}; use the GPU of that number, local_rank() "
            "modulo the visible ones, or leave ASYNCDDP_DEVICE_WIRES unset"
        )
