"""``cuda_staged``: transport of device tensors through pinned host memory, over a host transport.

The default, which always works: it needs nothing of the MPI library and nothing of the peer's
device. Not run on a GPU yet: tests run it in full over simulated streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.free_list import FreeList
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import DeviceTransport
from asyncddp.transport.cuda.ordered_requests import OrderedRequests
from asyncddp.transport.cuda.staged_pipeline import StagedRequest, StagingPlan

_PIECE = 1 << 22  # bytes; the same on all ranks
_PIECE_ALIGNMENT = 64  # bytes: whole elements of every dtype, and where parts of a buffer begin


class CudaStagedTransport(DeviceTransport):
    """Transport of GPU tensors that copies them through pinned memory and uses a host transport.

    Work that is on the compute stream when a request is started precedes it, and a request that is
    done has been done on the device as well. The calling thread never waits for the device.

    References:
        Wang et al., "MVAPICH2-GPU: optimized GPU to GPU communication for InfiniBand clusters",
        2011.
    """

    name = "cuda_staged"
    local_path = "in pieces through pinned host memory, mixed on the GPU"

    def __init__(
        self, base: Transport, streams: DeviceStreams, pool: FreeList[torch.Tensor] | None = None
    ) -> None:
        super().__init__(base, streams)
        self.pool = FreeList(streams.allocate_pinned) if pool is None else pool
        self._requests = OrderedRequests()

    def split(self, color: int, key: int) -> Transport:
        """Split the host transport; the parts use the same pool of pinned buffers."""
        return CudaStagedTransport(self.base.split(color, key), self.streams, self.pool)

    def close(self) -> None:
        """Drop all requests, and close the host transport."""
        self._requests.clear()
        super().close()

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Send in pieces, each once it has been copied to the host."""

        def transfer(send_buffer: torch.Tensor, _: torch.Tensor) -> Request:
            return self.base.isend(send_buffer, peer, tag)

        return self._start(as_bytes(data), None, transfer, ("to", peer, tag), must_finish=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Receive the same pieces, and copy each to the device once it has arrived."""

        def transfer(_: torch.Tensor, receive_buffer: torch.Tensor) -> Request:
            return self.base.irecv(receive_buffer, peer, tag)

        return self._start(None, as_bytes(out), transfer, ("from", peer, tag))

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Sum over ranks piece by piece."""
        into, dtype = tensor if out is None else out, tensor.dtype
        return self._start(
            as_bytes(tensor),
            as_bytes(into),
            lambda send_buffer, _: self.base.iallreduce(send_buffer.view(dtype), None, divisor),
        )

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Sum the same columns of all parts, piece by piece."""
        dtype = tensor.dtype
        return self._start(
            as_bytes(tensor),
            as_bytes(out),
            lambda send_buffer, receive_buffer: self.base.ireduce_scatter(
                send_buffer.view(dtype), receive_buffer.view(dtype), divisor
            ),
            parts=self.size,
        )

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Broadcast piece by piece: the root only reads, the others only write."""
        flat, mine = as_bytes(tensor), root == self.rank
        return self._start(
            flat if mine else None,
            None if mine else flat,
            lambda send_buffer, _: self.base.ibroadcast(send_buffer, root),
        )

    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Gather all at once."""
        dtype = tensor.dtype
        return self._start(
            as_bytes(tensor),
            as_bytes(out),
            lambda send_buffer, receive_buffer: self.base.iallgather(
                send_buffer.view(dtype), receive_buffer.view(dtype), counts
            ),
            whole=True,
        )

    def ibarrier(self) -> Request:
        """Start a barrier of the host transport, in order with the collectives."""
        return self._start(None, None, lambda *_: self.base.ibarrier())

    def _start(
        self,
        read: torch.Tensor | None,
        write: torch.Tensor | None,
        start_transfer: Callable[[torch.Tensor, torch.Tensor], Request],
        order_key: Hashable = "collective",
        *,
        whole: bool = False,
        must_finish: bool = False,
        parts: int = 0,
    ) -> Request:
        if order_key == "collective":
            self.require_collectives()
        streams = self.streams
        preceding = streams.record_event(StreamRole.COMPUTE)
        for tensor, role in ((read, StreamRole.DEVICE_TO_HOST), (write, StreamRole.HOST_TO_DEVICE)):
            if tensor is not None:
                streams.wait_event(role, preceding)
                streams.record_stream(tensor, role)
        room = _PIECE // (parts + 1)  # what is read and what is written share a buffer
        piece_bytes = 0 if whole else max(_PIECE_ALIGNMENT, room - room % _PIECE_ALIGNMENT)
        plan = StagingPlan(read, write, piece_bytes, start_transfer, order_key, must_finish, parts)
        drive = self._requests.advance
        staged = StagedRequest(plan, streams, self.pool, drive, self._note_abandoned)
        self._requests.append(staged)
        self._requests.advance()
        return staged

    def _note_abandoned(self, staged: StagedRequest) -> None:
        """Note that a request was abandoned; an unfinished collective breaks later ones."""
        if staged.order_key == "collective" and not staged.next_may_start:
            self.break_collectives()


def device_transport_for(transport: Transport, streams: DeviceStreams) -> Transport:
    """Return the device transport over a host transport, made on first use."""
    if transport.device_transports is None:
        transport.device_transports = {}
    known = transport.device_transports
    if streams not in known:
        make = transport.device_transport_factory or partial(CudaStagedTransport, transport)
        known[streams] = make(streams)
    return known[streams]
