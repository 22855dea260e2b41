"""Pipeline that moves a device tensor through pinned host memory and a transport, in pieces.

Each piece goes through stages, each of which waits for the one before it:

======== ==============================================  ====================
stage    action                                          waits for
======== ==============================================  ====================
READ     copy from the device to pinned memory           an event
TRANSFER message or part of a collective                 a request
WRITE    copy from pinned memory to the device           an event
======== ==============================================  ====================

so that piece k + 1 is read while piece k is transferred and piece k − 1 is written. Pieces enter
each stage in order. A send ends with TRANSFER, a receive begins with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.tensors.free_list import FreeList
from asyncddp.transport.base import Request

MAX_PIECES_IN_FLIGHT = 3  # of one request: one in each stage
_ALIGNMENT = 64
_MIN_BUFFER_BYTES = 4096


class PipelineStage(Enum):
    """Stage of moving a GPU tensor's piece: copy to host, transfer between ranks, copy to GPU."""

    READ = "read"
    TRANSFER = "transfer"
    WRITE = "write"


class StagingPlan(NamedTuple):
    """Plan of staging through pinned host memory: the tensors read and written, cut into pieces.

    Piece k is bytes ``k * piece_bytes`` to ``(k + 1) * piece_bytes`` of every part that is read
    or written; parts that have ended before add none.
    """

    read: Sequence[torch.Tensor]  # parts of one tensor on the device, as flat bytes
    write: Sequence[torch.Tensor]
    piece_bytes: int
    start_transfer: Callable[[StagedPiece], Request]
    order_key: Hashable  # requests with equal keys are transferred one after the other
    must_finish: bool = False  # True if it goes on when abandoned: its receiver counts on it
    apart: bool = False  # True if what is read and what is written may not share pinned memory

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages of each piece."""
        first = (PipelineStage.READ,) if self.read else ()
        last = (PipelineStage.WRITE,) if self.write else ()
        return (*first, PipelineStage.TRANSFER, *last)

    @property
    def pieces(self) -> int:
        """Number of pieces, at least one."""
        longest = max([part.nbytes for part in (*self.read, *self.write)], default=0)
        return max(1, -(-longest // self.piece_bytes))


class StagedPiece:
    """One piece of a transfer: its parts on the device, and the pinned memory for them."""

    def __init__(self, plan: StagingPlan, number: int, pool: FreeList[torch.Tensor]) -> None:
        start, end = number * plan.piece_bytes, (number + 1) * plan.piece_bytes
        self.number = number
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
        self.stage = -1
        self.waiting_for: DeviceEvent | Request | None = None


class StagedRequest:
    """Request that moves a GPU tensor through pinned host memory, piece by piece."""

    def __init__(
        self,
        plan: StagingPlan,
        streams: DeviceStreams,
        pool: FreeList[torch.Tensor],
        drive: Callable[[], None],
        on_abandon: Callable[[StagedRequest], None] = lambda _: None,
    ) -> None:
        self.plan, self.order_key, self._streams, self._pool = plan, plan.order_key, streams, pool
        self._drive, self._on_abandon = drive, on_abandon
        self._stages, self._pieces = plan.stages, plan.pieces
        self._in_flight: deque[StagedPiece] = deque()
        self._transfers: dict[int, Request] = {}
        self._num_begun = self._num_ended = self.num_transferred = 0
        self._problem: Exception | None = None
        self._given_up = False

    @property
    def over(self) -> bool:
        """True if the request has ended: done, failed or abandoned."""
        return self._num_ended == self._pieces or self._problem is not None or self._given_up

    @property
    def moves(self) -> int:
        """Number of stages that pieces have entered or left so far."""
        return self._num_begun + self.num_transferred + self._num_ended

    @property
    def next_may_start(self) -> bool:
        """True if the next request with the same order key may be transferred."""
        return self.num_transferred == self._pieces or self.over

    def done(self) -> bool:
        """Return whether all pieces have gone through all stages."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self._num_ended == self._pieces

    def abandon(self) -> None:
        """Give up the request unless it must finish; its buffers are not reused."""
        self._on_abandon(self)
        if not self.plan.must_finish:
            self._given_up = True
            self._release()

    def _release(self) -> None:
        """Abandon all transfers; buffers that the transport may still use are not reused."""
        for transfer in self._transfers.values():
            transfer.abandon()
        self._transfers.clear()
        self._in_flight.clear()

    def advance(self, *, first: bool) -> None:
        """Advance the pieces as far as possible without waiting."""
        try:
            while self._advance_all(first):
                pass
        except (RuntimeError, MemoryError) as problem:  # a peer's, or for want of memory
            self._problem = problem
            self._release()

    def _advance_all(self, first: bool) -> bool:
        """Start pieces up to the most in flight, and advance all; return if there is new room."""
        while self._num_begun < self._pieces and len(self._in_flight) < MAX_PIECES_IN_FLIGHT:
            piece = StagedPiece(self.plan, self._num_begun, self._pool)
            self._num_begun += 1
            self._in_flight.append(piece)
            if self._stages[0] is PipelineStage.READ:
                self._enter_stage(piece)
        for piece in list(self._in_flight):
            self._advance_piece(piece, first)
        before = self._num_ended
        while self._in_flight and self._in_flight[0].stage == len(self._stages):
            buffer = self._in_flight.popleft().buffer
            self._pool.give(buffer, buffer.nbytes)
            self._num_ended += 1
        return self._num_ended > before and not self.over

    def _advance_piece(self, piece: StagedPiece, first: bool) -> None:
        stages = self._stages
        while piece.stage < len(stages) and (piece.waiting_for is None or piece.waiting_for.done()):
            self._transfers.pop(piece.number, None)
            following = stages[piece.stage + 1 :]
            if not following:
                piece.stage = len(stages)
                return
            may_transfer = first and self.num_transferred == piece.number
            if following[0] is PipelineStage.TRANSFER and not may_transfer:
                return
            self._enter_stage(piece)

    def _enter_stage(self, piece: StagedPiece) -> None:
        piece.stage += 1
        stage, streams = self._stages[piece.stage], self._streams
        if stage is PipelineStage.TRANSFER:
            self.num_transferred += 1
            piece.waiting_for = self._transfers[piece.number] = self.plan.start_transfer(piece)
            return
        reads = stage is PipelineStage.READ
        role = StreamRole.DEVICE_TO_HOST if reads else StreamRole.HOST_TO_DEVICE
        parts, pinned = (
            (piece.read, piece.send_buffer) if reads else (piece.write, piece.receive_buffer)
        )
        rooms = torch.split(pinned, [part.nbytes for part in parts])
        for part, room in zip(parts, rooms, strict=True):
            if part.nbytes:
                streams.copy(room if reads else part, part if reads else room, role)
        piece.waiting_for = streams.record_event(role)
