"""``mpi``: mpi4py on a clone of COMM_WORLD, so that a user's own messages never match ours."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.mpi_collectives import MPICollectives, gathered
from asyncddp.transport.mpi_communicators import CommunicatorPair, pair_of_world
from asyncddp.transport.mpi_library import MPI
from asyncddp.transport.mpi_requests import Receive, Requests, translated
from asyncddp.transport.mpi_start import come_together
from asyncddp.transport.starting import Start

__all__ = ["MPITransport"]

_EAGER = 60 << 10  # bytes that MPI libraries send over TCP without asking the receiver first
_MESSAGE_TAG = 0
_FABRIC = Path("/sys/class/infiniband")  # is there where the wire is no TCP
_FAREWELL = 1.0  # seconds in which a rank that leaves tries to get its last messages out
_YIELDS = 20_000  # about 20 ms of looking for what a peer is about to send
_NAP = 0.00005  # seconds


class MPITransport(MPICollectives):
    """MPI between the ranks of one communicator.

    Args:
        pair: The communicators; clones of ``COMM_WORLD`` if not given.
        start: How long to wait for the other ranks where it is not given.

    Raises:
        EnvironmentProblem: The MPI library gives less than ``MPI_THREAD_FUNNELED``.
        WaitTimeoutError: Some ranks have not come by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """

    name = "mpi"

    def __init__(self, pair: CommunicatorPair | None = None, start: Start | None = None) -> None:
        if pair is None:
            come_together(Start.alone() if start is None else start)
        level = MPI.Query_thread()
        if level < MPI.THREAD_FUNNELED:
            raise EnvironmentProblem(
                "MPI was initialised with MPI_THREAD_SINGLE, which this library cannot use. Let "
                "mpi4py initialise it, or ask for MPI_THREAD_MULTIPLE in your own MPI_Init_thread."
            )
        self.threads = level >= MPI.THREAD_SERIALIZED
        self._world = pair is None
        self._pair = pair_of_world() if pair is None else pair
        self._comm, self._bulk = self._pair.comm, self._pair.bulk
        self.rank, self.size = self._comm.rank, self._comm.size
        self._posted: list[tuple[MPI.Request, bytes]] = []
        self._left: list[Requests] = []
        self._status = MPI.Status()
        self._near: frozenset[int] | None = None
        self._spins = 200 if _cores() >= self._comm.size else 0
        self._closed = False

    @classmethod
    def join(cls, start: Start) -> Transport:
        """Between all processes of the job."""
        return cls(start=start)

    @translated
    def post(self, peer: int, message: bytes) -> None:
        """Isend it; the bytes stay with us until MPI is through with them."""
        if len(self._posted) > 16:
            self._posted = [pair for pair in self._posted if not pair[0].Test()]
        request = self._comm.Isend([message, MPI.BYTE], peer, _MESSAGE_TAG)
        self._pair.sent[0][peer] += 1
        self._posted.append((request, message))

    @translated
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Receive whatever a matching probe finds, from anybody."""
        came = []
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, self._status)) is not None:
            message = bytearray(self._status.Get_count(MPI.BYTE))
            source = self._status.Get_source()
            found.Recv([message, MPI.BYTE])
            self._pair.received[0][source] += 1
            came.append((source, bytes(message)))
        if self._left:
            self._left = [request for request in self._left if not request.over()]
        return came

    def leave_behind(self, requests: Requests) -> None:
        """Keep an unwanted transfer's buffers alive until MPI is through with them."""
        self._pair.spoilt = True
        self._left.append(requests)

    def _most(self, peer: int) -> int | None:
        """Bytes of a piece for a peer; both ends say the same.

        A longer one is announced over TCP, and the answer waits in the peer's socket behind what
        the peer itself is sending here: both directions of a link would take turns.
        """
        return None if self._near is None or peer in self._near else _EAGER

    @translated
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Isend in pieces that leave at once, or that C ints can count."""
        pieces = self._pieces(data, self._most(peer))
        started = [self._bulk.Isend([piece, MPI.BYTE], peer, tag) for piece in pieces]
        self._pair.sent[1][peer] += len(pieces)
        return Requests(self, started, pieces)

    @translated
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Irecv in the same pieces."""
        pieces = self._pieces(out, self._most(peer))
        started = [self._bulk.Irecv([piece, MPI.BYTE], peer, tag) for piece in pieces]
        self._pair.received[1][peer] += len(pieces)
        return Receive(self, started, pieces)

    def split(self, color: int, key: int) -> Transport:
        """Split the communicator."""
        return MPITransport(self._pair.split(color, key))

    @translated
    def machine(self) -> int:
        """The lowest rank that shares memory with this one."""
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        try:
            near = gathered(node, self.rank, int)
        finally:
            node.Free()
        fabric = any(gathered(self._comm, _FABRIC.is_dir(), bool))
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

        The communicators stay for the next world.
        """
        if self._closed or MPI.Is_finalized():
            return
        self._closed = True
        deadline = time.monotonic() + _FAREWELL
        while self._posted and time.monotonic() < deadline:
            time.sleep(_NAP)
            self._forget_ended()
        self._pair.leave(world=self._world)
        _CLOSED.append(self)
        for transport in _CLOSED[:]:
            transport._forget_ended()
            if not (transport._posted or transport._left):
                _CLOSED.remove(transport)

    @translated
    def _forget_ended(self) -> None:
        """Let go of the buffers that MPI is through with."""
        self._posted = [pair for pair in self._posted if not pair[0].Test()]
        self._left = [request for request in self._left if not request.over()]

    def abort(self, code: int) -> None:
        """End all processes of the job."""
        MPI.COMM_WORLD.Abort(code)


_CLOSED: list[MPITransport] = []
"""Closed ones whose buffers MPI still uses."""


def _cores() -> int:
    return len(os.sched_getaffinity(0))
