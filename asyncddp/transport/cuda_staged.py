"""``cuda_staged``: tensors on a device go through pinned host memory, over any other wire.

The wire that always works. It needs nothing of the MPI library and nothing of the peer's device,
and it is the one that is used unless another one was asked for. Not run on a GPU yet: tests run it
in full over the stand-in of :mod:`asyncddp.memory.streams_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.pinned import PinnedPool
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.staged_pieces import Plan, Staged

__all__ = ["CudaStaged", "on_device"]

_PIECE = 1 << 22  # bytes; the same on all ranks
_UNIT = 64  # bytes: whole elements of every dtype, and where parts of a buffer begin


class CudaStaged(Transport):
    """A wire for tensors on a device, made of a wire for tensors on the host.

    It keeps the contract of :class:`~asyncddp.transport.contract.Transport` and adds stream order:
    what the queue WORK holds when a transfer is started comes before it, and a transfer that is
    done has been done on the device as well. The calling thread never waits for the device.

    Args:
        base: The wire beneath.
        streams: Of the device.
        pool: Pinned buffers; a pool of its own if not given.

    References:
        The three-stage pipeline of pinned copies and messages is that of Wang et al.,
        "MVAPICH2-GPU: optimized GPU to GPU communication for InfiniBand clusters", 2011.
    """

    name = "cuda_staged"

    def __init__(
        self, base: Transport, streams: DeviceStreams, pool: PinnedPool | None = None
    ) -> None:
        self.base, self.streams = base, streams
        self.rank, self.size, self.threads = base.rank, base.size, base.threads
        self.pool = PinnedPool(streams) if pool is None else pool
        self._active: list[Staged] = []
        self._broken = False

    # what does not touch the device

    def post(self, peer: int, message: bytes) -> None:
        """Over the wire beneath."""
        self.base.post(peer, message)

    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Over the wire beneath."""
        return self.base.poll()

    def machine(self) -> int:
        """As the wire beneath says."""
        return self.base.machine()

    def rest(self, attempt: int, *, background: bool = False) -> None:
        """As the wire beneath does."""
        self.base.rest(attempt, background=background)

    def abort(self, code: int) -> None:
        """As the wire beneath does."""
        self.base.abort(code)

    def split(self, color: int, key: int) -> Transport:
        """Split the wire beneath; the parts use the same pinned memory."""
        return CudaStaged(self.base.split(color, key), self.streams, self.pool)

    def close(self) -> None:
        """Close the wire beneath."""
        self._active.clear()
        self.base.close()

    # what does

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Send in pieces, each once it has been read."""
        return self._start(
            as_bytes(data),
            None,
            lambda given, _: self.base.isend(given, peer, tag),
            ("to", peer, tag),
            leaves=True,
        )

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Receive the same pieces, and write each once it has come."""
        return self._start(
            None,
            as_bytes(out),
            lambda _, taken: self.base.irecv(taken, peer, tag),
            ("from", peer, tag),
        )

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """Sum piece by piece."""
        into, dtype = tensor if out is None else out, tensor.dtype
        return self._collective(
            as_bytes(tensor),
            as_bytes(into),
            lambda given, _: self.base.iallreduce(given.view(dtype), None, divisor),
        )

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """Sum the same columns of all parts, piece by piece."""
        dtype = tensor.dtype
        return self._collective(
            as_bytes(tensor),
            as_bytes(out),
            lambda given, taken: self.base.ireduce_scatter(
                given.view(dtype), taken.view(dtype), divisor
            ),
            parts=self.size,
        )

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """Broadcast piece by piece: the root only reads, the others only write."""
        flat, mine = as_bytes(tensor), root == self.rank
        return self._collective(
            flat if mine else None,
            None if mine else flat,
            lambda given, _: self.base.ibroadcast(given, root),
        )

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """Gather all at once."""
        dtype = tensor.dtype
        return self._collective(
            as_bytes(tensor),
            as_bytes(out),
            lambda given, taken: self.base.iallgather(given.view(dtype), taken.view(dtype), counts),
            whole=True,
        )

    def ibarrier(self) -> Transfer:
        """A barrier of the wire beneath, in its turn among the collectives."""
        return self._collective(None, None, lambda *_: self.base.ibarrier())

    def _collective(
        self,
        read: torch.Tensor | None,
        write: torch.Tensor | None,
        carry: Callable[[torch.Tensor, torch.Tensor], Transfer],
        *,
        whole: bool = False,
        parts: int = 0,
    ) -> Transfer:
        if self._broken:
            raise PeerError(
                "collectives cannot go on: an earlier collective was given up while some ranks had "
                "not joined it. End and restart the run."
            )
        return self._start(read, write, carry, "collective", whole=whole, parts=parts)

    def _start(
        self,
        read: torch.Tensor | None,
        write: torch.Tensor | None,
        carry: Callable[[torch.Tensor, torch.Tensor], Transfer],
        line: Hashable,
        *,
        whole: bool = False,
        leaves: bool = False,
        parts: int = 0,
    ) -> Transfer:
        streams = self.streams
        earlier = streams.mark(Queue.WORK)
        for tensor, queue in ((read, Queue.OUT), (write, Queue.IN)):
            if tensor is not None:
                streams.after(queue, earlier)
                streams.hold(tensor, queue)
        step = _PIECE // (parts + 1)  # what is read and what is written share a buffer
        step = 0 if whole else max(_UNIT, step - step % _UNIT)
        plan = Plan(read, write, step, carry, line, leaves, parts)
        staged = _Watched(plan, self)
        self._active.append(staged)
        self.drive()
        return staged

    def give_up(self, staged: Staged) -> None:
        """A transfer is abandoned; a collective that has not begun on the wire cannot be undone."""
        if staged.plan.line == "collective" and not staged.all_carried:
            self._broken = True

    def drive(self) -> None:
        """Move all transfers on, in the order in which they were started."""
        waiting: set[Hashable] = set()
        for staged in self._active:
            line = staged.plan.line
            staged.move(free=line not in waiting)
            if not staged.all_carried:
                waiting.add(line)
        self._active = [staged for staged in self._active if not staged.over]


class _Watched(Staged):
    """A transfer whose end concerns its wire."""

    def __init__(self, plan: Plan, wire: CudaStaged) -> None:
        super().__init__(plan, wire.streams, wire.pool, wire.drive)
        self._wire = wire

    def abandon(self) -> None:
        """Give it up."""
        self._wire.give_up(self)
        super().abandon()


def on_device(transport: Transport, streams: DeviceStreams) -> Transport:
    """The wire for tensors on a device over a wire for the host; made when first asked for."""
    wires = transport.device_wires
    if wires is None:
        wires = transport.device_wires = {}
    if streams not in wires:
        make = transport.device_wire
        wires[streams] = CudaStaged(transport, streams) if make is None else make(streams)
    return wires[streams]
