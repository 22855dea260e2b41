"""Ranks whose tensors count as lying on a device, and go by a stand-in for NCCL."""

from __future__ import annotations

import asyncddp as bf
from asyncddp.context import current
from asyncddp.device.stream_registry import use_streams_on_cpu
from asyncddp.testing.rank_function_call import DEFAULT_SETTINGS
from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl
from tests.support.worlds import LoopbackWorld

__all__ = ["NcclWorld"]

SECONDS = 60.0


class NcclWorld(LoopbackWorld):
    """Ranks that are threads of this process.

    Args:
        size: Number of ranks.
        seed: Of the order in which the device does things; an odd one comes with cupy 13.
        room, hardware_queues: Of a rank's device, as of LateDevice.

    Attributes:
        nccl: The stand-in of the last run.
    """

    transport = "nccl"

    def __init__(self, size, seed=0, room=64, hardware_queues=None):
        super().__init__(size)
        self._seed, self._device = seed, (seed, room, hardware_queues)

    def _fresh(self):
        device = LateDevice(*self._device)
        self.nccl = FakeNccl(device, cupy=14 - self._seed % 2)
        return device

    def outcomes(self, case, *args, settings=None, limit=120.0, **kwargs):
        device, opened = self._fresh(), []

        def body():
            transport = current().transport
            device.be_rank(bf.rank())
            with current().engine.lock:
                device_transport = NCCLTransport.open(
                    transport, device, (), SECONDS, self.nccl.library(bf.rank())
                )
            opened.append(device_transport)
            transport.device_transport_factory = device_transport.for_device
            return case(*args, **kwargs)

        with use_streams_on_cpu(device):
            found = super().outcomes(body, settings=settings, limit=limit)
        for device_transport in opened:
            device_transport.free()
        return found

    def run_bare(self, case, *args, **kwargs):
        device, ends = self._fresh(), LoopbackTransport.group(self.size)

        def body():
            base = ends[bf.rank()]
            device.be_rank(bf.rank())
            transport = NCCLTransport.open(base, device, (), SECONDS, self.nccl.library(bf.rank()))
            try:
                return case(transport, *args, **kwargs)
            finally:
                transport.close()

        with bf.local_world(self.size, **DEFAULT_SETTINGS) as world:
            return world.run(body)
