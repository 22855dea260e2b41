"""One transfer of a tensor on a device through the host, piece by piece.

Each piece goes through stages, each of which waits for the one before it:

=======  ==============================================  ====================
stage    what happens                                    waits for
=======  ==============================================  ====================
READ     device to pinned memory, on the queue OUT       an event
CARRY    a message or a part of a collective             the wire's transfer
WRITE    pinned memory to the device, on the queue IN    an event
=======  ==============================================  ====================

so that piece k + 1 is read while piece k is carried and piece k − 1 is written. Pieces enter each
stage in their order. A send ends with CARRY, a receive begins with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import NamedTuple

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.pinned import PinnedPool
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.transport.contract import Transfer

__all__ = ["DEPTH", "Plan", "Stage", "Staged"]

DEPTH = 3
"""Pieces of one transfer that are under way at a time: one in each stage."""

_ALIGNMENT = 64
_LEAST = 4096


class Stage(Enum):
    """What happens to a piece."""

    READ = "read"
    CARRY = "carry"
    WRITE = "write"


class Plan(NamedTuple):
    """What a transfer does.

    Attributes:
        read: Bytes on the device that are read, flat; None where nothing is.
        write: Bytes on the device that are written, flat; None where nothing is.
        step: Bytes of a piece, or of a piece's columns; 0 for all at once, read and written in
            memory of their own.
        carry: Starts what the wire does with a piece: takes the bytes that were read and those that
            are written next, in pinned memory; the same bytes where there are several pieces.
        line: Transfers of one line are carried one after the other.
        leaves: Whether it goes on where it is abandoned, since its receiver counts on it.
        parts: Into how many equal parts what is read is cut, where a piece is the same columns of
            each, and is written as one such part; 0 where pieces lie one behind the other.
    """

    read: torch.Tensor | None
    write: torch.Tensor | None
    step: int
    carry: Callable[[torch.Tensor, torch.Tensor], Transfer]
    line: Hashable
    leaves: bool = False
    parts: int = 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that each piece goes through."""
        first = () if self.read is None else (Stage.READ,)
        last = () if self.write is None else (Stage.WRITE,)
        return (*first, Stage.CARRY, *last)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes that are read and that are written; where one is nothing, that of the other."""
        sizes = [side.nbytes for side in (self.read, self.write) if side is not None] or [0]
        return sizes[0], sizes[-1]

    @property
    def pieces(self) -> int:
        """How many pieces there are; nothing is one piece as well."""
        return max(1, -(-self.width // self.step)) if self.step else 1

    @property
    def width(self) -> int:
        """Bytes of what is cut into pieces: of a part, or of all."""
        return self.sizes[0] // (self.parts or 1)

    @property
    def apart(self) -> bool:
        """Whether a piece is read and written in memory of its own each."""
        return self.step == 0 or self.parts > 0


class _Piece:
    """A piece under way, in its buffer."""

    def __init__(self, plan: Plan, number: int, pool: PinnedPool) -> None:
        rows, width = plan.parts or 1, plan.width
        self.number, self.start = number, number * plan.step
        columns = min(plan.step, width - self.start) if plan.step else width
        given = rows * columns
        offset = -(-given // _ALIGNMENT) * _ALIGNMENT if plan.apart else 0
        taken = columns if plan.step else plan.sizes[1]
        self.buffer = pool.take(_room(max(given, offset + taken)))
        self.given = self.buffer[:given]
        self.taken = self.buffer[offset : offset + taken]
        self.rows = self.given.view(rows, columns)
        self.stage = -1
        self.waits: Event | Transfer | None = None


class Staged:
    """A transfer under way; moved on by the wire, for all that are.

    Args:
        plan: What it does.
        streams: Of the device.
        pool: Pinned buffers.
        drive: Moves all transfers of the wire on.
    """

    def __init__(
        self, plan: Plan, streams: DeviceStreams, pool: PinnedPool, drive: Callable[[], None]
    ) -> None:
        self.plan, self._streams, self._pool, self._drive = plan, streams, pool, drive
        self._stages, self._pieces = plan.stages, plan.pieces
        self._flight: deque[_Piece] = deque()
        self._on_the_wire: dict[int, Transfer] = {}
        self._begun = self._ended = self.carried = 0
        self._problem: PeerError | None = None
        self._given_up = False

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done."""
        return self._ended == self._pieces or self._problem is not None or self._given_up

    @property
    def all_carried(self) -> bool:
        """Whether the next one of its line may be carried."""
        return self.carried == self._pieces or self.over

    def done(self) -> bool:
        """Whether all pieces have gone through all stages."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self._ended == self._pieces

    def abandon(self) -> None:
        """Give it up, unless it is to leave; its buffers are not used again."""
        if self.plan.leaves:
            return
        self._given_up = True
        self._let_go()

    def _let_go(self) -> None:
        """Nothing is waited for any more; buffers that the wire may still use stay out of use."""
        for transfer in self._on_the_wire.values():
            transfer.abandon()
        self._on_the_wire.clear()
        self._flight.clear()

    def move(self, *, free: bool) -> None:
        """Go on as far as possible without waiting.

        Args:
            free: Whether it is the first of its line.
        """
        try:
            while self._round(free):
                pass
        except PeerError as problem:
            self._problem = problem
            self._let_go()

    def _round(self, free: bool) -> bool:
        """Move every piece; whether that made room for more."""
        self._begin()
        for piece in list(self._flight):
            self._move(piece, free)
        before = self._ended
        while self._flight and self._flight[0].stage == len(self._stages):
            self._pool.give(self._flight.popleft().buffer)
            self._ended += 1
        return self._ended > before and not self.over

    def _begin(self) -> None:
        """Let more pieces enter the first stage that needs no turn."""
        while self._begun < self._pieces and len(self._flight) < DEPTH:
            piece = _Piece(self.plan, self._begun, self._pool)
            self._begun += 1
            self._flight.append(piece)
            if self._stages[0] is Stage.READ:
                self._start(piece)

    def _move(self, piece: _Piece, free: bool) -> None:
        while piece.stage < len(self._stages) and (piece.waits is None or piece.waits.done()):
            self._on_the_wire.pop(piece.number, None)
            following = piece.stage + 1
            if following == len(self._stages):
                piece.stage = following
                return
            carries = self._stages[following] is Stage.CARRY
            if carries and not (free and self.carried == piece.number):
                return
            self._start(piece)

    def _start(self, piece: _Piece) -> None:
        """Let a piece enter its next stage."""
        piece.stage += 1
        plan, stage = self.plan, self._stages[piece.stage]
        if stage is Stage.CARRY:
            self.carried += 1
            piece.waits = self._on_the_wire[piece.number] = plan.carry(piece.given, piece.taken)
        elif stage is Stage.READ and plan.read is not None:
            for number, row in enumerate(piece.rows):
                start = number * plan.width + piece.start
                self._copy(row, plan.read[start : start + row.nbytes], Queue.OUT)
            piece.waits = self._streams.mark(Queue.OUT)
        elif plan.write is not None:
            out = plan.write[piece.start : piece.start + piece.taken.nbytes]
            self._copy(out, piece.taken, Queue.IN)
            piece.waits = self._streams.mark(Queue.IN)

    def _copy(self, out: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
        if out.nbytes:
            self._streams.copy(out, source, queue)


def _room(size: int) -> int:
    """Bytes of the buffer for so many: a power of two, so that few sizes wait in the pool."""
    return max(_LEAST, 1 << max(0, size - 1).bit_length())
