"""``nccl``: tensors on GPUs by NCCL, through cupy, out of the tensors' own memory.

Collectives are NCCL's, and so are messages between two ranks: :mod:`~asyncddp.transport.nccl_pairs`
says how those, which match by tag, go by a library whose messages match by order. Not run on a GPU
yet; tests run it over a library that checks what it is handed, does on the host what NCCL does on
GPUs, as late as it likes, and finds ranks that wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.errors import EnvironmentProblem
from asyncddp.memory.allocate import values
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import CudaStaged
from asyncddp.transport.nccl_collectives import Collectives, has_sum
from asyncddp.transport.nccl_communicator import Communicator, run_apart
from asyncddp.transport.nccl_library import Library, library, limit_channels, new_identity
from asyncddp.transport.nccl_pairs import Pairs, Room
from asyncddp.transport.one_device import OneDevice

__all__ = ["NCCL"]

_ID_BYTES = 128
_PATIENCE = 60.0  # seconds for the ranks of a part to find each other


class NCCL(OneDevice):
    """A wire for tensors on GPUs whose collectives and messages are NCCL's.

    Collectives run on a stream of their own and messages on one for each peer, after the work that
    was queued before them. What NCCL cannot sum is staged, and so is what goes to more peers than
    the GPU has room for.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
        door: cupy.
        communicator: Of all ranks.
        notes: A wire of its own between the same ranks, for what two of them agree about.
        room: For the communicators of pairs.

    References:
        NCCL's documentation, "Types", "Point-to-point communication" and "Using multiple NCCL
        communicators concurrently"; cupy's, ``cupy.cuda.nccl.NcclCommunicator``.
    """

    name = "nccl"

    def __init__(
        self,
        base: Transport,
        streams: DeviceStreams,
        door: Library,
        communicator: Communicator,
        notes: Transport,
        room: Room,
    ) -> None:
        super().__init__(base, streams)
        self._door, self._room = door, room
        self.collectives = Collectives(streams, door.nccl, communicator, base.rank, base.size)
        self.pairs = Pairs(base.rank, streams, door, notes, room, self._staged)

    @classmethod
    def open(
        cls,
        base: Transport,
        streams: DeviceStreams,
        timeout: float,
        door: Library | None = None,
        room: Room | None = None,
    ) -> NCCL:
        """Make the wire, with a communicator of all ranks of ``base``; collective.

        Args:
            base: The wire for tensors on the host.
            streams: Of the device.
            timeout: Seconds for the ranks to exchange the communicator's identity, and for the
                first collectives.
            door: cupy, or what has its interface.
            room: For the communicators of pairs; that of the device if not given.

        Raises:
            EnvironmentProblem: There is no NCCL, or it refuses this group.
            PeerError: The first collectives have failed, or were not done in time.
        """
        if door is None:
            limit_channels()
            door = library()
        own = new_identity(door.nccl) if base.rank == 0 else bytes(_ID_BYTES)
        shared = values(list(own), torch.uint8)
        base.broadcast(shared, 0, timeout)
        identity = bytes(shared.tolist())
        try:
            communicator = Communicator.open(door, streams, base.size, identity, base.rank)
        except RuntimeError as problem:
            raise EnvironmentProblem(
                f"rank {base.rank}: NCCL makes no communicator of {base.size} ranks ({problem}). "
                "It refuses two ranks on one GPU; leave it out of ASYNCDDP_DEVICE_WIRES then"
            ) from problem
        notes = base.split(0, base.rank)
        room = Room.of(streams.device) if room is None else room
        wire = cls(base, streams, door, communicator, notes, room)
        wire.finish(wire.collectives.warm_up(), timeout, "the first collectives of NCCL")
        return wire

    def beside(self, base: Transport) -> NCCL:
        """The wire for a part of these ranks, with a communicator of its own; collective in it.

        Args:
            base: The wire between the part's ranks, for tensors on the host.
        """
        return NCCL.open(base, self.streams, _PATIENCE, self._door, self._room)

    def split(self, color: int, key: int) -> Transport:
        """Split the wire beneath, and give each part a communicator of its own.

        A rank that is alone stages.
        """
        base = self.base.split(color, key)
        return CudaStaged(base, self.streams, self.pool) if base.size == 1 else self.beside(base)

    def free(self) -> None:
        """Give all communicators back; waits a few seconds at most, whatever the peers do."""
        self.pairs.close()
        end = self.collectives.communicator.ending()
        run_apart([] if end is None else [end])

    def close(self) -> None:
        """Give all communicators back, and close the wires beneath."""
        self.free()
        super().close()

    # messages

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Send out of the tensor's memory, once the peer has its receive ready."""
        if peer == self.rank:
            return super().isend(data, peer, tag)
        return self.pairs.begin(data, peer, tag, sends=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Receive into the tensor's memory; what lies on the host instead is dropped."""
        if peer == self.rank:
            return super().irecv(out, peer, tag)
        return self.pairs.begin(out, peer, tag, sends=False)

    def _staged(self, data: torch.Tensor, peer: int, tag: int, sends: bool) -> Transfer:
        return super().isend(data, peer, tag) if sends else super().irecv(data, peer, tag)

    # collectives

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """``ncclAllReduce``; dtypes that NCCL has not are staged."""
        if not has_sum(tensor.dtype):
            return super().iallreduce(tensor, out, divisor)
        return self.collectives.allreduce(tensor, tensor if out is None else out, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """``ncclReduceScatter``; dtypes that NCCL has not are staged."""
        if not has_sum(tensor.dtype):
            return super().ireduce_scatter(tensor, out, divisor)
        return self.collectives.reduce_scatter(tensor, out, divisor)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """``ncclBroadcast`` of the bytes."""
        return self.collectives.broadcast(tensor, root)

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """``ncclAllGather`` of the bytes; where parts differ in size, a group of broadcasts."""
        return self.collectives.allgather(tensor, out, counts)
