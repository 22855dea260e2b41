"""Averaging rounds with neighbours by messages, which send buckets whole or in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern, JoinedRanks
from asyncddp.algorithms.rounds.averaging_round import AveragerState, BucketExchange, BucketPiece
from asyncddp.algorithms.rounds.message_round import AllreduceRound, MessageRound
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_allreduce import average_by_row_nonblocking, find_fast_path
from asyncddp.ops.uneven_inputs import among_active, renormalise, skip_round_nonblocking


class NeighborRound(MessageRound):
    """Averaging round with the neighbours in the graph of ranks, by messages.

    Weights of joined ranks are moved to this rank's own tensor.
    """

    name = "neighbor_allreduce"
    how = CommunicationPattern.NEIGHBORS
    nodes = "ranks"
    override_names = ("self_weight", "src_weights", "dst_weights")
    supports_join = True
    sums = False

    @override
    def _plan(self) -> None:
        self.row = self._choose_row()
        self.copies_sent = 0 if self.row is None else len(self.row.dst_weights)

    @override
    @classmethod
    def of(
        cls, averager: AveragerState, number: int, active: Collection[int] | None = None
    ) -> MessageRound:
        if averager.algorithm.averages_all(number):
            return AllreduceRound.of(averager, number, active)
        kind = PiecewiseRound if averager.piece_bytes is not None else cls
        return kind(averager, number, active)

    def _choose_row(self) -> WeightRow | None:
        """Return the weights among the active ranks; None for a joined rank that is not needed."""
        averager, rank, active = self._averager, self._averager.context.rank, self._active
        method = averager.algorithm
        uniform, relays = method.needs.uniform, method.joined_ranks is JoinedRanks.RELAY
        if active is not None and rank not in active and not uniform and not relays:
            return None
        row = self._resolved_row(averager.schedule_of_ranks, rank)
        if active is not None and uniform:
            return among_active(row, rank, active)
        if active is not None and not relays:
            by_columns = method.needs.column_stochastic
            return renormalise(row, active, pushed_by=rank if by_columns else None)
        return row

    @override
    def _average(self, tensor: torch.Tensor, **options: Any) -> Handle[torch.Tensor]:
        if self.row is None:
            return skip_round_nonblocking(tensor, **options)
        return average_by_row_nonblocking(tensor, self.row, **options)

    @override
    def _fast_path(self, flat: torch.Tensor, name: str) -> Callable[[], bool] | None:
        if self.row is None:
            return None
        return find_fast_path(self._averager.context, self.row, flat, name)


class _PieceUnderWay(NamedTuple):
    """Piece of a bucket that is being averaged, and the memory of its messages in bytes."""

    piece: BucketPiece
    handle: Handle[torch.Tensor]
    nbytes: int


class PiecewiseRound(NeighborRound):
    r"""Averaging round with neighbours in pieces of equal size, few of them at a time.

    .. math:: x_i[p] \leftarrow w_{ii} x_i[p] + \sum_j w_{ij} x_j[p], \qquad p = 0, 1, \dots

    All pieces have one name, so that ranks on one machine pass them through one ring buffer, which
    holds two. Each rank copies its old piece there before it writes the average in place. Otherwise
    pieces are sent by message, as many at a time as the averager's buffer has room for, at least
    one of each in-neighbour. The order is the same on all ranks: from the last bucket to the first,
    as gradients become ready.
    """

    splits = True

    @override
    def _plan(self) -> None:
        super()._plan()
        self._pieces, buffer = self._averager.pieces(), self._averager.buffer
        assert buffer is not None
        self._ahead = buffer.ahead
        self._room = buffer.message_room(self._pieces[0].flat.nbytes)
        self._ends = {piece.bucket: number for number, piece in enumerate(self._pieces, start=1)}
        self._under_way: deque[_PieceUnderWay] = deque()
        self._sent = self._written = 0  # pieces

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        self._count(bucket, bucket.flat)
        exchange = BucketExchange(partial(self._write, self._ends[bucket.index]))
        self._started[bucket.index] = exchange
        if self._ahead:
            self._advance(in_place=self._averager.in_place)
        return exchange

    def _advance(self, *, in_place: bool, limited: bool = True) -> None:
        """Send the next pieces of started buckets, while there is room for received pieces."""
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
                handle = self._average(piece.flat, name=piece.name, **out)
                self._under_way.append(_PieceUnderWay(piece, handle, nbytes))
                self._sent, taken = self._sent + 1, taken + nbytes

    def _message_bytes(self, *, in_place: bool) -> int:
        """Compute the memory of a piece in flight: received, scaled and averaged tensors."""
        row = self.row
        assert row is not None
        scaled = sum(factor != 1.0 for factor in row.dst_weights.values())
        result = not (in_place or row.reuses_received)
        return (len(row.sources) + scaled + result) * self._pieces[0].flat.nbytes

    @override
    def wait_for_reads(self) -> None:
        """Exchange all pieces if some were sent already, and keep their averages."""
        averager = self._averager
        if not self._ahead or not self._started:
            return
        with averager.exposed_time:
            self._advance(in_place=averager.in_place, limited=False)
            for one in self._under_way:
                one.handle.wait()

    @property
    @override
    def is_complete(self) -> bool:
        sent = self._sent == len(self._pieces) or not self._ahead
        return sent and all([one.handle.poll() for one in self._under_way])

    @override
    def _order(self) -> list[int]:
        return sorted(self._started, reverse=True)

    def _write(self, end: int) -> None:
        """Write the averages of all pieces before piece ``end``."""
        while self._written < end:
            if self._under_way or not self._average_piece_at_once():
                self._advance(in_place=True)
                piece, handle, _ = self._under_way.popleft()
                average = handle.wait()
                if average is not piece.flat:
                    piece.flat.copy_(average)
            self._written += 1

    def _average_piece_at_once(self) -> bool:
        """Average the next piece in this thread by the fast path; False if there is none."""
        piece = self._pieces[self._sent]
        fast_path = self._fast_path(piece.flat, piece.name)
        if fast_path is None or not fast_path():
            return False
        self._sent += 1
        return True
