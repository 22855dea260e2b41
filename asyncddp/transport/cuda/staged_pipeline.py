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
from collections.abc import Callable, Hashable
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
    """Plan of a transfer through pinned memory: what is read, transferred and written, and how."""

    read: torch.Tensor | None  # bytes on the device, flat
    write: torch.Tensor | None  # bytes on the device, flat
    piece_bytes: int  # of a piece, or of its columns; 0 for all at once, in buffers apart
    start_transfer: Callable[[torch.Tensor, torch.Tensor], Request]
    """Starts the transfer of a piece: takes the bytes that were read and those to write next, in
    pinned memory; the same bytes where there are several pieces."""
    order_key: Hashable  # requests with equal keys are transferred one after the other
    must_finish: bool = False  # True if it goes on when abandoned: its receiver counts on it
    parts: int = 0
    """Into how many equal parts what is read is cut, where a piece is the same columns of each, and
    is written as one such part; 0 where pieces lie one behind the other."""

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages of each piece."""
        first = () if self.read is None else (PipelineStage.READ,)
        last = () if self.write is None else (PipelineStage.WRITE,)
        return (*first, PipelineStage.TRANSFER, *last)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of bytes read and written; where one is none, that of the other."""
        sizes = [side.nbytes for side in (self.read, self.write) if side is not None] or [0]
        return sizes[0], sizes[-1]

    @property
    def pieces(self) -> int:
        """Number of pieces, at least one."""
        return max(1, -(-self.width // self.piece_bytes)) if self.piece_bytes else 1

    @property
    def width(self) -> int:
        """Bytes of what is cut into pieces: of a part, or of all."""
        return self.sizes[0] // (self.parts or 1)


class _StagedPiece:
    def __init__(self, plan: StagingPlan, number: int, pool: FreeList[torch.Tensor]) -> None:
        rows, width = plan.parts or 1, plan.width
        self.number, self.start = number, number * plan.piece_bytes
        columns = min(plan.piece_bytes, width - self.start) if plan.piece_bytes else width
        send_bytes = rows * columns
        apart = plan.piece_bytes == 0 or plan.parts > 0  # what is read, and what is written
        offset = -(-send_bytes // _ALIGNMENT) * _ALIGNMENT if apart else 0
        receive_bytes = columns if plan.piece_bytes else plan.sizes[1]
        size = max(_MIN_BUFFER_BYTES, send_bytes, offset + receive_bytes)
        self.buffer = pool.take(1 << (size - 1).bit_length())  # the pool holds few sizes
        self.send_buffer = self.buffer[:send_bytes]
        self.receive_buffer = self.buffer[offset : offset + receive_bytes]
        self.rows = self.send_buffer.view(rows, columns)
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
        self._in_flight: deque[_StagedPiece] = deque()
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
            piece = _StagedPiece(self.plan, self._num_begun, self._pool)
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

    def _advance_piece(self, piece: _StagedPiece, first: bool) -> None:
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

    def _enter_stage(self, piece: _StagedPiece) -> None:
        piece.stage += 1
        plan, stage = self.plan, self._stages[piece.stage]
        if stage is PipelineStage.TRANSFER:
            self.num_transferred += 1
            piece.waiting_for = self._transfers[piece.number] = plan.start_transfer(
                piece.send_buffer, piece.receive_buffer
            )
        elif stage is PipelineStage.READ and plan.read is not None:
            for number, row in enumerate(piece.rows):
                start = number * plan.width + piece.start
                self._copy(row, plan.read[start : start + row.nbytes], StreamRole.DEVICE_TO_HOST)
            piece.waiting_for = self._streams.record_event(StreamRole.DEVICE_TO_HOST)
        elif plan.write is not None:
            out = plan.write[piece.start : piece.start + piece.receive_buffer.nbytes]
            self._copy(out, piece.receive_buffer, StreamRole.HOST_TO_DEVICE)
            piece.waiting_for = self._streams.record_event(StreamRole.HOST_TO_DEVICE)

    def _copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        if out.nbytes:
            self._streams.copy(out, source, role)
