"""Ranks in one thread that read each other's memory by ``cuda_ipc``, on a device each."""

from __future__ import annotations

import torch

from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams

__all__ = ["NEVER", "Device", "Pair", "all_done", "exportable"]

NEVER = 10**9
"""A stand-in that is asked so often makes its next copy."""


class Device(SimulatedStreams):
    """A device beside others: while one is waited for all of them go on."""

    def __init__(self, laziness, beside):
        super().__init__(laziness)
        self.beside = beside
        beside.append(self)

    def go_on(self):
        return any([SimulatedStreams.go_on(device) for device in self.beside])


class Pair:
    """Two transports in one thread, each with a device that does something only when it is told."""

    def __init__(self, near=(0, 1), laziness=0, size=2):
        ends, notes, answers = (LoopbackTransport.group(size) for _ in range(3))
        self.devices = []
        for _ in range(size):
            Device(laziness, self.devices)
        self.transports = [
            CudaIPCTransport(
                ends[place], streams, set(near) - {place}, notes[place], answers[place]
            )
            for place, streams in enumerate(self.devices)
        ]

    def work(self):
        """The devices do one thing each; whether there was one."""
        return self.devices[0].go_on()

    def finish(self, *transfers):
        """Wait for transfers while the devices work."""
        for _ in range(5000):
            ended = [transfer.done() for transfer in transfers]
            if all(ended):
                return
            self.work()
        raise AssertionError(f"nothing moves: {ended}")

    def receive(self, like, tag, rank=1):
        """What rank 0 sends."""
        out = torch.empty_like(like)
        self.finish(self.transports[rank].irecv(out, 0, tag))
        return out

    def exchange(self, data, tag=0):
        """What rank 1 gets where rank 0 sends."""
        sending, out = self.transports[0].isend(data, 1, tag), torch.empty_like(data)
        self.finish(self.transports[1].irecv(out, 0, tag), sending)
        return out


def all_done(*transfers):
    """Whether transfers are done though the devices do nothing."""
    for _ in range(3):
        ended = all([transfer.done() for transfer in transfers])
    return ended


def exportable(transport, data):
    """A tensor in memory that peers can be shown, as all memory of a GPU can."""
    return (
        transport.streams.allocate_exportable(data.nbytes)
        .view(data.dtype)
        .view(data.shape)
        .copy_(data)
    )
