"""``cuda_staged``: transport of device tensors through pinned host memory and a host transport.

It always works, since it requires nothing of the MPI library or of the peer's device. Without a
GPU, tests run it in full over simulated streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import ClassVar

import torch

from asyncddp.device.stream_interfaces import DeviceStreams, StreamRole
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import DeviceTransport
from asyncddp.transport.cuda.pending_requests import PendingRequests
from asyncddp.transport.cuda.staged_pipeline import StagedPiece, StagedRequest, StagingPlan

_PIECE = 1 << 22  # bytes; the same on all ranks
_PIECE_ALIGNMENT = 64  # bytes: whole elements of every dtype, and where parts of a buffer begin


class CudaStagedTransport(DeviceTransport):
    """Transport of GPU tensors that copies them through pinned memory, over a host transport.

    A request follows all work that is on the compute stream when it is started, and is done only
    when the device is done as well. The calling thread never waits for the device.

    References:
        Wang et al., "MVAPICH2-GPU: optimized GPU to GPU communication for InfiniBand clusters",
        2011.
    """

    name = "cuda_staged"
    max_piece: ClassVar[int | None] = None
    """Maximum size of a piece in bytes, equal on all ranks; None for the default."""
    local_path = "in pieces through pinned host memory, mixed on the GPU"

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        super().__init__(base, streams)
        self._requests = PendingRequests()

    def watch(self, timeout: float) -> object:
        """Advance all staged requests."""
        self._requests.advance()
        return None

    def close(self) -> None:
        """Drop all requests, and close the host transport."""
        self._requests.clear()
        super().close()

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to send in pieces, each after its copy to the host."""

        def transfer(piece: StagedPiece) -> Request:
            return self.base.isend(piece.send_buffer, peer, tag)

        return self._start([as_bytes(data)], [], transfer, ("to", peer, tag), must_finish=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to receive in pieces, each copied to the device once it has arrived."""

        def transfer(piece: StagedPiece) -> Request:
            return self.base.irecv(piece.receive_buffer, peer, tag)

        return self._start([], [as_bytes(out)], transfer, ("from", peer, tag))

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start an allreduce, piece by piece."""
        into, dtype = tensor if out is None else out, tensor.dtype
        return self._start(
            [as_bytes(tensor)],
            [as_bytes(into)],
            lambda piece: self.base.iallreduce(piece.send_buffer.view(dtype), None, divisor),
        )

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start a reduce-scatter, piece by piece; a piece has the same elements of all parts."""
        dtype = tensor.dtype
        return self._start(
            torch.split(as_bytes(tensor), [out.nbytes] * self.size),
            [as_bytes(out)],
            lambda piece: self.base.ireduce_scatter(
                piece.send_buffer.view(dtype), piece.receive_buffer.view(dtype), divisor
            ),
            apart=True,
        )

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast, piece by piece; the root only reads, other ranks only write."""
        flat, mine = [as_bytes(tensor)], root == self.rank
        return self._start(
            flat if mine else [],
            [] if mine else flat,
            lambda piece: self.base.ibroadcast(
                piece.send_buffer if mine else piece.receive_buffer, root
            ),
        )

    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather, piece by piece; a piece has the same elements of all ranks' parts."""
        dtype, size = tensor.dtype, tensor.element_size()
        return self._start(
            [as_bytes(tensor)],
            torch.split(as_bytes(out), [count * size for count in counts]),
            lambda piece: self.base.iallgather(
                piece.send_buffer.view(dtype),
                piece.receive_buffer.view(dtype),
                [part.nbytes // size for part in piece.write],
            ),
            apart=True,
        )

    def ibarrier(self) -> Request:
        """Start a barrier of the host transport, in order with the collectives."""
        return self._start([], [], lambda _: self.base.ibarrier())

    def _start(
        self,
        read: Sequence[torch.Tensor],
        write: Sequence[torch.Tensor],
        start_transfer: Callable[[StagedPiece], Request],
        order_key: Hashable = "collective",
        *,
        must_finish: bool = False,
        apart: bool = False,
    ) -> Request:
        if order_key == "collective":
            self.require_collectives()
        self.streams.begin_copies(read, StreamRole.DEVICE_TO_HOST)
        self.streams.begin_copies(write, StreamRole.HOST_TO_DEVICE)
        largest = self.max_piece or _PIECE
        room = largest // (len(read) + len(write)) if apart else largest
        piece_bytes = max(_PIECE_ALIGNMENT, room - room % _PIECE_ALIGNMENT)
        plan = StagingPlan(read, write, piece_bytes, start_transfer, order_key, must_finish, apart)
        staged = StagedRequest(plan, self.streams, self._requests.advance, self._note_abandoned)
        self._requests.append(staged)
        self._requests.advance()
        return staged

    def _note_abandoned(self, staged: StagedRequest) -> None:
        """Record that a request was abandoned; an unfinished collective breaks later ones."""
        if staged.order_key == "collective" and not staged.next_may_start:
            self.break_collectives()


def device_transport_for(transport: Transport, streams: DeviceStreams) -> Transport:
    """Return the device transport over a host transport, created on first use."""
    if transport.device_transports is None:
        transport.device_transports = {}
    known = transport.device_transports
    if streams not in known:
        make = transport.device_transport_factory or partial(CudaStagedTransport, transport)
        known[streams] = made = make(streams)
        if transport.device_watches is not None:
            transport.device_watches.append(made.watch)
    return known[streams]
