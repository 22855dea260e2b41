"""Ranks in one thread that read each other's memory by ``cuda_ipc``, on a device each."""

from __future__ import annotations

import itertools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncddp.serialization import pack, unpack
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams

__all__ = ["NEVER", "Device", "Pair", "all_done"]

NEVER = 10**9
"""A stand-in that is asked so often makes its next copy."""


class Device(SimulatedStreams):
    """A device beside others: while one is waited for all of them go on.

    It holds its ranks to the rules of CUDA IPC: what was exported is not freed while a peer has it
    open, and a token is opened once.
    """

    def __init__(self, laziness, beside, exports):
        super().__init__(laziness)
        self.beside, self.exports = beside, exports
        beside.append(self)

    def go_on(self):
        for number, (memory, openings) in self.exports.items():
            mapped = not all(opening.expired() for opening in openings)
            assert not (mapped and memory.expired()), f"export {number} was freed while it is open"
        return any([SimulatedStreams.go_on(device) for device in self.beside])

    def export_memory(self, tensor):
        inner, number = super().export_memory(tensor), len(self.exports)
        self.exports[number] = StorageWeakRef(tensor.untyped_storage()), []
        return pack((number, inner))

    def import_memory(self, token):
        number, inner = unpack(token, tuple[int, bytes], "a token")
        assert not self.exports[number][1], f"the token of export {number} was opened before"
        memory = super().import_memory(inner)
        self.exports[number][1].append(StorageWeakRef(memory.untyped_storage()))
        return memory


class Pair:
    """Two transports in one thread, each with a device that does something only when it is told."""

    def __init__(self, near=(0, 1), laziness=0, size=2):
        ends, notes = (LoopbackTransport.group(size) for _ in range(2))
        self.devices, exports = [], {}
        for _ in range(size):
            Device(laziness, self.devices, exports)
        self.transports = [
            CudaIPCTransport(ends[place], streams, set(near) - {place}, notes[place])
            for place, streams in enumerate(self.devices)
        ]

    def work(self):
        """The devices do one thing each; whether there was one."""
        return self.devices[0].go_on()

    def drive(self, *ranks):
        """Let some ranks handle their messages, as any request of theirs does."""
        for _, rank in itertools.product(range(4), ranks or range(len(self.transports))):
            self.transports[rank]._drive_tasks()
            self.work()

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
