"""Averaging rounds in which buckets travel in pieces of equal size, few of them at a time."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from typing_extensions import override

from asyncddp.algorithms.averaging_round import (
    AveragingRound,
    BeforeWrite,
    BucketAveragingFunctions,
    BucketPiece,
    CrossRoundState,
)
from asyncddp.algorithms.communication_buffer import CommunicationBuffer
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow


class _PieceUnderWay(NamedTuple):
    """Piece that is being averaged, and the bytes of memory that its messages take."""

    piece: BucketPiece
    handle: Handle[torch.Tensor]
    nbytes: int


class PiecewiseRound(AveragingRound):
    r"""Averaging round in which buckets travel in pieces of equal size, few of them at a time.

    .. math:: x_i[p] \leftarrow w_{ii} x_i[p] + \sum_j w_{ij} x_j[p], \qquad p = 0, 1, \dots

    All pieces have one name, so that ranks on one machine pass them through one ring buffer, which
    holds two. Each rank copies its old piece there before it writes the average in place. Elsewhere
    pieces travel by message, as many at a time as the averager's buffer has room for, at least one
    of each in-neighbour. The order is the same on all ranks: from the last bucket to the first, as
    gradients become ready.
    """

    def __init__(
        self,
        averager: CrossRoundState,
        plan: BucketAveragingFunctions,
        row: WeightRow,
        buffer: CommunicationBuffer,
    ) -> None:
        self._averager, self._plan, self._row = averager, plan, row
        self._pieces, self._ahead = averager.pieces(), buffer.ahead
        self._room = buffer.message_room(self._pieces[0].flat.nbytes)
        self._started: set[int] = set()
        self._under_way: deque[_PieceUnderWay] = deque()
        self._sent = self._written = 0  # pieces

    @override
    def start(self, index: int) -> None:
        averager = self._averager
        with averager.exposed_time:
            bucket = averager.buckets[index]
            averager.bytes_sent += self._plan.send_bytes(bucket, bucket.flat)
            self._started.add(index)
            if self._ahead:
                self._send(in_place=averager.in_place)

    @override
    def has_started(self, index: int) -> bool:
        return index in self._started

    def _send(self, *, in_place: bool, limited: bool = True) -> None:
        """Send the next pieces of started buckets, while there is room for what they receive."""
        nbytes = self._message_bytes(in_place=in_place)
        taken = sum(one.nbytes for one in self._under_way)
        with use(self._averager.context), torch.no_grad():
            while self._sent < len(self._pieces):
                piece = self._pieces[self._sent]
                if piece.bucket not in self._started:
                    return
                if limited and self._under_way and taken + nbytes > self._room:
                    return
                out = {"out": piece.flat} if in_place else {}
                handle = self._plan.start(piece.flat, name=piece.name, **out)
                self._under_way.append(_PieceUnderWay(piece, handle, nbytes))
                self._sent, taken = self._sent + 1, taken + nbytes

    def _message_bytes(self, *, in_place: bool) -> int:
        """Compute the bytes that a piece takes under way: received, scaled to send, averaged."""
        row = self._row
        scaled = sum(factor != 1.0 for factor in row.dst_weights.values())
        result = not (in_place or row.reuses_received)
        return (len(row.sources) + scaled + result) * self._pieces[0].flat.nbytes

    @override
    def wait_for_reads(self) -> None:
        """Exchange all pieces, if some are sent already; their averages are kept."""
        averager = self._averager
        if not self._ahead or not self._started:
            return
        with averager.exposed_time:
            self._send(in_place=averager.in_place, limited=False)
            for one in self._under_way:
                one.handle.wait()

    @property
    @override
    def is_complete(self) -> bool:
        sent = self._sent == len(self._pieces) or not self._ahead
        return sent and all([one.handle.poll() for one in self._under_way])

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        last = max(number for number, one in enumerate(self._pieces) if one.bucket == index)
        self._write(last + 1, before_write)

    @override
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        self._write(len(self._pieces), before_write)
        self._averager.round += 1

    def _write(self, end: int, before_write: BeforeWrite | None) -> None:
        """Write the averages of the pieces before ``end``."""
        averager = self._averager
        with averager.exposed_time, torch.no_grad():
            if before_write is not None:
                for index in dict.fromkeys(one.bucket for one in self._pieces[self._written : end]):
                    before_write(index)
            while self._written < end:
                if self._under_way or not self._average_at_once():
                    self._send(in_place=True)
                    piece, handle, _ = self._under_way.popleft()
                    average = handle.wait()
                    if average is not piece.flat:
                        piece.flat.copy_(average)
                self._written += 1

    def _average_at_once(self) -> bool:
        """Average the next piece on this thread, if its neighbours read it in shared memory."""
        piece = self._pieces[self._sent]
        fast_path = self._plan.fast_path(piece.flat, piece.name)
        if fast_path is None or not fast_path():
            return False
        self._sent += 1
        return True
