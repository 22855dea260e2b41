"""Pipeline that transfers a device tensor through pinned host memory and a host transport.

The tensor is divided into pieces. Each piece passes through stages, one after another:

======== ==============================================  ====================
stage    action                                          waits for
======== ==============================================  ====================
READ     copy from the device to pinned memory           an event
TRANSFER message or part of a collective                 a request
WRITE    copy from pinned memory to the device           an event
======== ==============================================  ====================

so that piece k + 1 is read while piece k is transferred and piece k − 1 is written. Pieces enter
each stage in order. A send ends with TRANSFER, a receive begins with TRANSFER.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from asyncddp.device.stream_interfaces import DeviceStreams, StreamRole
from asyncddp.tensors.free_list import FreeList
from asyncddp.transport.base import TRANSFER_ERRORS, Request
from asyncddp.transport.cuda.pending_requests import PendingRequest

MAX_PIECES_IN_FLIGHT = 3  # of one request: one in each stage
_ALIGNMENT = 64
_MIN_BUFFER_BYTES = 4096


class StagingPlan(NamedTuple):
    """Plan of a staged transfer: tensors to read and write, size of pieces, transfer function.

    Piece k consists of bytes ``k * piece_bytes`` to ``(k + 1) * piece_bytes`` of every part that is
    read or written; shorter parts contribute nothing.
    """

    read: Sequence[torch.Tensor]  # parts of one tensor on the device, as flat bytes
    write: Sequence[torch.Tensor]
    piece_bytes: int
    start_transfer: Callable[[StagedPiece], Request]
    order_key: Hashable  # requests with equal keys are transferred one after the other
    must_finish: bool = False  # True if it goes on when abandoned: its receiver counts on it
    apart: bool = False  # True if what is read and what is written may not share pinned memory

    @property
    def pieces(self) -> int:
        """Number of pieces, at least one."""
        longest = max([part.nbytes for part in (*self.read, *self.write)], default=0)
        return max(1, -(-longest // self.piece_bytes))


class StagedPiece:
    """One piece of a staged transfer: its parts on the device, and pinned memory for them."""

    def __init__(self, plan: StagingPlan, number: int, pool: FreeList[torch.Tensor]) -> None:
        start, end = number * plan.piece_bytes, (number + 1) * plan.piece_bytes
        self.read = [part[start:end] for part in plan.read]
        self.write = [part[start:end] for part in plan.write]
        send_bytes, receive_bytes = (
            sum(min(part.nbytes, plan.piece_bytes) for part in side)  # of the first, the largest
            for side in (plan.read, plan.write)
        )
        offset = -(-send_bytes // _ALIGNMENT) * _ALIGNMENT if plan.apart else 0
        size = max(_MIN_BUFFER_BYTES, send_bytes, offset + receive_bytes)
        self.buffer = pool.take(1 << (size - 1).bit_length())  # the pool holds few sizes
        self.send_buffer = self.buffer[: sum(part.nbytes for part in self.read)]
        self.receive_buffer = self.buffer[offset:][: sum(part.nbytes for part in self.write)]


class StagedRequest(PendingRequest):
    """Request of a staged transfer: moves a GPU tensor through pinned memory, piece by piece."""

    def __init__(
        self,
        plan: StagingPlan,
        streams: DeviceStreams,
        drive: Callable[[], None],
        on_abandon: Callable[[StagedRequest], None] = lambda _: None,
    ) -> None:
        super().__init__(plan.order_key, drive)
        self._plan, self._streams, self._on_abandon = plan, streams, on_abandon
        self._pieces = plan.pieces
        self._in_flight: list[Iterator[None]] = []
        self._transfers: dict[int, Request] = {}
        self._first = False
        self._num_begun = self._num_transferred = self._num_ended = 0

    @property
    def moves(self) -> int:
        """Progress count: number of stages that pieces have entered or left."""
        return self._num_begun + self._num_transferred + self._num_ended

    def done(self) -> bool:
        """Return whether all pieces have passed all stages."""
        return super().done() and self._num_ended == self._pieces

    def abandon(self) -> None:
        """Abandon the request unless it must finish; its buffers are not reused."""
        self._on_abandon(self)
        if not self._plan.must_finish:
            self._give_up()

    def _give_up(self) -> None:
        """Abandon all transfers; buffers that the transport may still use are not reused."""
        self.next_may_start = self.over = True
        for transfer in self._transfers.values():
            transfer.abandon()
        self._transfers.clear()
        self._in_flight.clear()

    def advance(self, *, first: bool) -> None:
        """Advance all pieces as far as possible without waiting, and start further pieces."""
        self._first = first
        try:
            while not self.over:
                while (
                    self._num_begun < self._pieces and len(self._in_flight) < MAX_PIECES_IN_FLIGHT
                ):
                    self._in_flight.append(self._move_piece(self._num_begun))
                    self._num_begun += 1
                moving = [piece for piece in self._in_flight if not next(piece, True)]
                if len(moving) == len(self._in_flight):
                    break
                self._in_flight = moving
                self.over = self._num_ended == self._pieces
            self.next_may_start = self.over or self._num_transferred == self._pieces
        except TRANSFER_ERRORS as problem:
            self._problem = problem
            self._give_up()

    def _move_piece(self, number: int) -> Iterator[None]:
        """Move a piece through its stages; yield whenever it would have to wait."""
        plan, streams = self._plan, self._streams
        piece = StagedPiece(plan, number, streams.pinned)
        if plan.read:
            rooms = torch.split(piece.send_buffer, [part.nbytes for part in piece.read])
            read = streams.enqueue_copies(rooms, piece.read, StreamRole.DEVICE_TO_HOST)
            while not read.done():
                yield
        while not self._first or self._num_transferred < number:
            yield
        self._num_transferred += 1
        transfer = self._transfers[number] = plan.start_transfer(piece)
        while not transfer.done():
            yield
        del self._transfers[number]
        if plan.write:
            rooms = torch.split(piece.receive_buffer, [part.nbytes for part in piece.write])
            written = streams.enqueue_copies(piece.write, rooms, StreamRole.HOST_TO_DEVICE)
            while not written.done():
                yield
        streams.pinned.give(piece.buffer, piece.buffer.nbytes)
        self._num_ended += 1
