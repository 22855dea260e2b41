"""Non-blocking collectives of MPI itself, for tensors of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.means import rounds, scaled, split_divisor
from asyncddp.transport.base import Request
from asyncddp.transport.mpi.communicator_pair import CommunicatorPair
from asyncddp.transport.mpi.point_to_point import LARGEST_PIECE, MPICollectiveRequest, cut
from asyncddp.transport.mpi.runtime import MPI

_MAX_COUNT = (1 << 31) - 1
_NARROW = (torch.uint8, torch.int8, torch.int16)


class MPICollectives:
    """Collectives of the ranks of a communicator, by MPI's non-blocking collectives.

    Tensors are cut into pieces that MPI can count, the same on all ranks.

    Args:
        pair: The communicators.
        give_up: Called where a rank stops waiting for one of them.
    """

    def __init__(self, pair: CommunicatorPair, give_up: Callable[[], None]) -> None:
        self._pair, self._comm, self._give_up = pair, pair.comm, give_up

    def _start(
        self,
        start: Callable[[Any], MPI.Request],
        pieces: Sequence[Any],
        keep: object = None,
        finish: Callable[[], object] | None = None,
    ) -> Request:
        """Start the pieces of one collective; keep their memory until all have completed."""
        self._pair.collectives += 1
        self._pair.pending_collectives += 1
        started = [start(piece) for piece in pieces]
        return MPICollectiveRequest(self._pair, started, keep, finish, self._give_up)

    def allreduce(self, tensor: torch.Tensor, into: torch.Tensor, divisor: int | None) -> Request:
        """Start an allreduce of a tensor into another, and divide the sum."""
        (scale, rest), wide = split_divisor(divisor), _summed_in(tensor.dtype, divisor)
        datatype, operation = _reduction(wide)
        total = into if wide == into.dtype else empty(into.shape, wide)
        same = into.data_ptr() == tensor.data_ptr() or scale != 1 or total is not into
        if scale != 1 or total is not into:
            scaled(tensor, scale, total)

        def start(pair: tuple[MPI.buffer, MPI.buffer]) -> MPI.Request:
            count = len(pair[1]) // total.element_size()
            given: Any = MPI.IN_PLACE if same else [pair[0], count, datatype]
            return self._comm.Iallreduce(given, [pair[1], count, datatype], operation)

        pieces = list(zip(cut(total if same else tensor), cut(total), strict=True))
        return self._start(start, pieces, (tensor, total), partial(_finish, total, into, rest))

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None
    ) -> Request:
        """Start a reduce-scatter; this rank keeps its part of the sum."""
        (scale, rest), wide = split_divisor(divisor), _summed_in(tensor.dtype, divisor)
        datatype, operation = _reduction(wide)
        total = out if wide == out.dtype else empty(out.shape, wide)
        ranks = self._comm.size
        # larger tensors are copied in blocks of columns
        step = max(1, LARGEST_PIECE // (ranks * total.element_size()))

        def start(pair: tuple[torch.Tensor, torch.Tensor]) -> MPI.Request:
            count = pair[1].numel()  # per part: mpi4py counts what is sent in the same way
            given, taken = ([as_bytes(side).numpy(), count, datatype] for side in pair)
            return self._comm.Ireduce_scatter_block(given, taken, operation)

        columns = [*torch.split(tensor.view(ranks, out.numel()), step, dim=1)]
        if scale != 1 or total is not out:
            columns = [scaled(one, scale, empty(one.shape, wide)) for one in columns]
        columns = [column.contiguous() for column in columns]
        pairs = list(zip(columns, torch.split(total, step), strict=True))
        return self._start(start, pairs, pairs, partial(_finish, total, out, rest))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast from the root, in place."""
        pieces = cut(tensor)
        return self._start(lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), pieces, tensor)

    def allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather; rank r contributes ``counts[r]`` elements."""
        if out.nbytes > _MAX_COUNT:  # more than MPI can count, but for a rank's own
            parts = torch.split(out.view(-1), list(counts))
            parts[self._comm.rank].copy_(tensor.view(-1))
            pieces = [(piece, root) for root, part in enumerate(parts) for piece in cut(part)]
            return self._start(
                lambda one: self._comm.Ibcast([one[0], MPI.BYTE], one[1]), pieces, out
            )
        size = tensor.element_size()
        given = [as_bytes(tensor).numpy(), MPI.BYTE]
        taken = [as_bytes(out).numpy(), [count * size for count in counts], MPI.BYTE]
        both = given, taken
        return self._start(lambda both: self._comm.Iallgatherv(*both), [both], both)

    def barrier(self) -> Request:
        """Start a barrier."""
        return self._start(lambda _: self._comm.Ibarrier(), [None])


def _summed_in(dtype: torch.dtype, divisor: int | None) -> torch.dtype:
    """Return the dtype for MPI's sum; in narrow integers MPI may saturate where torch wraps."""
    if divisor is not None and rounds(dtype):
        return torch.float64
    return torch.int32 if dtype in _NARROW else dtype


def _finish(total: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """Divide a sum, and copy it to its destination if needed."""
    if divisor != 1:
        total.div_(divisor)
    if total is not out:
        out.copy_(total.round_() if total.is_floating_point() else total)


def _reduction(dtype: torch.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    return getattr(MPI, DTYPES[dtype].mpi), MPI.LOR if dtype == torch.bool else MPI.SUM
