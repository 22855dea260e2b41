"""Ranks whose tensors count as lying on a device, and go by a stand-in for NCCL."""

from __future__ import annotations

import asyncddp as bf
from asyncddp.context import current
from asyncddp.memory.streams import stand_in
from asyncddp.transport.loopback import Loopback
from asyncddp.transport.nccl import NCCL
from tests.support.case import DEFAULTS
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
        room: Kernels that wait for other ranks and fit on a rank's device.

    Attributes:
        nccl: The stand-in of the last run.
    """

    wire = "nccl"

    def __init__(self, size, seed=0, room=64):
        super().__init__(size)
        self._seed, self._room = seed, room

    def _fresh(self):
        device = LateDevice(self._seed, self._room)
        self.nccl = FakeNccl(device, cupy=14 - self._seed % 2)
        return device

    def outcomes(self, case, *args, settings=None, limit=120.0, **kwargs):
        device, wires = self._fresh(), []

        def body():
            transport = current().transport
            wire = NCCL.open(transport, device, SECONDS, self.nccl.library(bf.rank()))
            wires.append(wire)
            transport.device_wire = wire.for_device
            return case(*args, **kwargs)

        with stand_in(device):
            found = super().outcomes(body, settings=settings, limit=limit)
        for wire in wires:
            wire.free()
        return found

    def run_bare(self, case, *args, **kwargs):
        device, ends = self._fresh(), Loopback.group(self.size)

        def body():
            base = ends[bf.rank()]
            wire = NCCL.open(base, device, SECONDS, self.nccl.library(bf.rank()))
            try:
                return case(wire, *args, **kwargs)
            finally:
                wire.close()

        with bf.local_world(self.size, **DEFAULTS) as world:
            return world.run(body)
