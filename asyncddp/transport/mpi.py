"""``mpi``: mpi4py on a clone of COMM_WORLD, so that a user's own messages never match ours."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.errors import ArgumentError, EnvironmentProblem, PeerError, PeerLeftError
from asyncddp.memory.dtypes import DTYPES
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.mpi_library import MPI

__all__ = ["MPITransport"]

P = ParamSpec("P")
R = TypeVar("R")

_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_EAGER = 60 << 10  # bytes that MPI libraries send over TCP without asking the receiver first
_COUNTABLE = (1 << 31) - 1
_MESSAGE_TAG = 0
_FABRIC = Path("/sys/class/infiniband")  # is there where the wire is no TCP
_FAREWELL = 1.0  # seconds in which a rank that leaves tries to get its last messages out
_YIELDS = 20_000  # about 20 ms of looking for what a peer is about to send
_NAP = 0.00005  # seconds


def _translated(call: Callable[P, R]) -> Callable[P, R]:
    """Turn MPI's exceptions into ours."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call, with MPI's errors as ours."""
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            kind = error.Get_error_class()
            failed = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
            if kind in failed:
                raise PeerLeftError(f"MPI reports that a process has failed: {error}") from error
            raise PeerError(f"MPI call {call.__name__} failed: {error}") from error

    return wrapper


class _Requests:
    """MPI requests of one transfer, with the buffers that must outlive them."""

    def __init__(self, owner: MPITransport, requests: list[MPI.Request], keep: Any) -> None:
        self._owner, self._requests, self._keep = owner, requests, keep
        self._ended = 0

    @_translated
    def done(self) -> bool:
        """Test the requests, which end in their order, or nearly so."""
        while self._ended < len(self._requests):
            if not self._requests[self._ended].Test():
                return False
            self._ended += 1
        return True

    def over(self) -> bool:
        """Whether MPI has done with it, well or not."""
        try:
            return self.done()
        except PeerError:
            return True

    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        self._owner.leave_behind(self)


class _Receive(_Requests):
    """A receive, which MPI can cancel."""

    @_translated
    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
        super().abandon()


class _Collective(_Requests):
    """A collective, which MPI cannot cancel: the communicator is of no use afterwards."""

    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        self._owner.broken = "an earlier collective was given up while some ranks had not joined it"
        super().abandon()


class _Divided:
    """A sum that is divided when it has come."""

    def __init__(self, total: Transfer, tensor: torch.Tensor, divisor: int) -> None:
        self._total, self._tensor, self._divisor = total, tensor, divisor
        self._done = False

    def done(self) -> bool:
        """Whether it has come; divided once."""
        if not self._done and self._total.done():
            self._tensor.div_(self._divisor)
            self._done = True
        return self._done

    def abandon(self) -> None:
        """Give the sum up."""
        self._total.abandon()


class MPITransport(Transport):
    """MPI between the ranks of one communicator.

    Args:
        comm: The communicator; a clone of ``COMM_WORLD`` if not given.

    Raises:
        EnvironmentProblem: The MPI library gives less than ``MPI_THREAD_FUNNELED``.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        level = MPI.Query_thread()
        if level < MPI.THREAD_FUNNELED:
            raise EnvironmentProblem(
                "MPI was initialised with MPI_THREAD_SINGLE, which this library cannot use. Let "
                "mpi4py initialise it, or ask for MPI_THREAD_MULTIPLE in your own MPI_Init_thread."
            )
        self.threads = level >= MPI.THREAD_SERIALIZED
        self._comm: MPI.Intracomm = MPI.COMM_WORLD.Dup() if comm is None else comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._bulk = self._comm.Dup()
        self._bulk.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.broken: str | None = None
        self._posted: list[tuple[MPI.Request, bytes]] = []
        self._left: list[_Requests] = []
        self._status = MPI.Status()
        self._near: frozenset[int] | None = None
        self._spins = 200 if _cores() >= self._comm.size else 0
        self._closed = False

    @_translated
    def post(self, peer: int, message: bytes) -> None:
        """Isend it; the bytes stay with us until MPI is through with them."""
        if len(self._posted) > 16:
            self._posted = [pair for pair in self._posted if not pair[0].Test()]
        request = self._comm.Isend([message, MPI.BYTE], peer, _MESSAGE_TAG)
        self._posted.append((request, message))

    @_translated
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Receive whatever a matching probe finds, from anybody."""
        came = []
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, self._status)) is not None:
            message = bytearray(self._status.Get_count(MPI.BYTE))
            source = self._status.Get_source()
            found.Recv([message, MPI.BYTE])
            came.append((source, bytes(message)))
        if self._left:
            self._left = [request for request in self._left if not request.over()]
        return came

    def leave_behind(self, requests: _Requests) -> None:
        """Keep an unwanted transfer's buffers alive until MPI is through with them."""
        self._left.append(requests)

    def _pieces(self, data: torch.Tensor, most: int | None = None) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a tensor in pieces of whole elements that C ints can count."""
        flat = as_bytes(data).numpy()
        most = _PIECE if most is None else most
        step = max(data.element_size(), most - most % data.element_size())
        return [flat[start : start + step] for start in range(0, max(1, flat.size), step)]

    def _most(self, peer: int) -> int:
        """Bytes of a piece for a peer; both ends say the same.

        A longer one is announced over TCP, and the answer waits in the peer's socket behind what
        the peer itself is sending here: both directions of a link would take turns.
        """
        return _PIECE if self._near is None or peer in self._near else _EAGER

    @_translated
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Isend in pieces that leave at once, or that C ints can count."""
        pieces = self._pieces(data, self._most(peer))
        started = [self._bulk.Isend([piece, MPI.BYTE], peer, tag) for piece in pieces]
        return _Requests(self, started, pieces)

    @_translated
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Irecv in the same pieces."""
        pieces = self._pieces(out, self._most(peer))
        started = [self._bulk.Irecv([piece, MPI.BYTE], peer, tag) for piece in pieces]
        return _Receive(self, started, pieces)

    def _collective(self, start: Callable[[Any], MPI.Request], pieces: Sequence[Any]) -> Transfer:
        """Start a collective for each piece, the same number on all ranks."""
        if self.broken:
            raise PeerError(f"collectives cannot go on: {self.broken}. End and restart the run.")
        return _Collective(self, [start(piece) for piece in pieces], pieces)

    @_translated
    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """Iallreduce, piece by piece."""
        datatype, operation = _summed(tensor.dtype)
        into = tensor if out is None else out
        same = into.data_ptr() == tensor.data_ptr()

        def start(pair: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]) -> MPI.Request:
            """Start the reduction of one piece."""
            count = pair[0].size // tensor.element_size()
            given: Any = MPI.IN_PLACE if same else [pair[0], count, datatype]
            return self._comm.Iallreduce(given, [pair[1], count, datatype], operation)

        pieces = list(zip(self._pieces(tensor), self._pieces(into), strict=True))
        under_way = self._collective(start, pieces)
        return under_way if divisor is None else _Divided(under_way, into, divisor)

    @_translated
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """Ireduce_scatter_block; what C ints cannot count is copied, column by column."""
        datatype, operation = _summed(tensor.dtype)
        step = max(1, _PIECE // (self.size * tensor.element_size()))

        def start(pair: tuple[torch.Tensor, torch.Tensor]) -> MPI.Request:
            """Start the reduction of some columns."""
            count = pair[1].numel()  # of a part: so mpi4py counts what is sent, too
            given, taken = ([as_bytes(side).numpy(), count, datatype] for side in pair)
            return self._comm.Ireduce_scatter_block(given, taken, operation)

        parts = torch.split(tensor.view(self.size, out.numel()), step, dim=1)
        columns = [part.contiguous() for part in parts]
        pairs = list(zip(columns, torch.split(out, step), strict=True))
        under_way = self._collective(start, pairs)
        return under_way if divisor is None else _Divided(under_way, out, divisor)

    @_translated
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """Ibcast of the bytes, piece by piece."""
        return self._collective(
            lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), self._pieces(tensor)
        )

    @_translated
    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """Iallgatherv of the bytes.

        Raises:
            ArgumentError: There are more bytes than the C ints of MPI 3 can count.
        """
        if out.nbytes > _COUNTABLE:
            raise ArgumentError(
                f"allgather of {out.nbytes} bytes in all: expected at most {_COUNTABLE}, which MPI "
                "can count; gather the tensor in parts"
            )
        size = tensor.element_size()
        given = [as_bytes(tensor).numpy(), MPI.BYTE]
        taken = [as_bytes(out).numpy(), [count * size for count in counts], MPI.BYTE]
        return self._collective(lambda both: self._comm.Iallgatherv(*both), [(given, taken)])

    @_translated
    def ibarrier(self) -> Transfer:
        """Ibarrier."""
        return self._collective(lambda _: self._comm.Ibarrier(), [None])

    @_translated
    def split(self, color: int, key: int) -> Transport:
        """Split the communicator."""
        part = self._comm.Split(color, key)
        return MPITransport(cast("MPI.Intracomm", part))

    @_translated
    def machine(self) -> int:
        """The lowest rank that shares memory with this one."""
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        try:
            near: list[int] = node.allgather(self.rank)
        finally:
            node.Free()
        fabric = self._comm.allreduce(int(_FABRIC.is_dir()), MPI.MAX)
        self._near = None if fabric else frozenset(near)
        return near[0]

    def rest(self, attempt: int, *, background: bool = False) -> None:
        """Spin while there are cores enough, then yield, then sleep; in the background sleep."""
        if background:
            time.sleep(_NAP if attempt < 1000 else 10 * _NAP)
        elif attempt >= self._spins + _YIELDS:
            time.sleep(_NAP if attempt < 2 * _YIELDS else 10 * _NAP)
        elif attempt >= self._spins:
            os.sched_yield()

    def close(self) -> None:
        """Let what was posted leave, for a second at most.

        The communicators stay until MPI ends: MPI would give the number of a freed one to the next
        clone, which would then receive what peers had sent to the old one.
        """
        if self._closed or MPI.Is_finalized():
            return
        self._closed = True
        deadline = time.monotonic() + _FAREWELL
        while self._posted and time.monotonic() < deadline:
            time.sleep(_NAP)
            self._forget_ended()
        _CLOSED.append(self)
        for transport in _CLOSED[:]:
            transport._forget_ended()
            if not (transport._posted or transport._left):
                _CLOSED.remove(transport)

    @_translated
    def _forget_ended(self) -> None:
        """Let go of the buffers that MPI is through with."""
        self._posted = [pair for pair in self._posted if not pair[0].Test()]
        self._left = [request for request in self._left if not request.over()]

    def abort(self, code: int) -> None:
        """End all processes of the job."""
        MPI.COMM_WORLD.Abort(code)


_CLOSED: list[MPITransport] = []
"""Closed ones whose buffers MPI still uses."""


def _summed(dtype: torch.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    """What MPI calls a dtype, and how it forms sums of it."""
    return getattr(MPI, DTYPES[dtype].mpi), MPI.LOR if dtype == torch.bool else MPI.SUM


def _cores() -> int:
    return len(os.sched_getaffinity(0))
