"""MPI transport through mpi4py, on duplicates of COMM_WORLD that keep user messages apart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport.base import Request, Transport, has_ended
from asyncddp.transport.collective_algorithms import FEW_RANKS, SHORT_BYTES
from asyncddp.transport.collective_request import RunningCollectives
from asyncddp.transport.message_collectives import MessageCollectives
from asyncddp.transport.mpi.communicator_pair import (
    CommunicatorPair,
    acquire_world_pair,
    allgather_records,
)
from asyncddp.transport.mpi.mpi_requests import MPICollectiveRequest
from asyncddp.transport.mpi.point_to_point import LARGEST_PIECE, MPIPointToPoint, cut
from asyncddp.transport.mpi.runtime import MPI, translate_mpi_errors
from asyncddp.transport.mpi.startup import start_and_synchronize
from asyncddp.transport.polling_pause import SLEEP_SECONDS, PollingPause, outnumber_cores
from asyncddp.transport.shared_memory.collective_buffers import SharedCollectiveBuffers
from asyncddp.transport.startup_deadline import StartupDeadline
from asyncddp.transport.tcp_send_queue import TCPSendQueueLimit, listening_ports

_MAX_COUNT = (1 << 31) - 1
_MESSAGE_TAG = 0
_COLLECTIVE_TAGS = range(1, 1 << 15)
_FABRIC = Path("/sys/class/infiniband")  # exists where the network is not TCP
_CLOSE_TIMEOUT = 1.0  # seconds in which close() tries to send the last messages


class _NetworkRecord(NamedTuple):
    """What a rank says of its machine: its first rank, open ports, a fabric, shared buffers."""

    machine: int
    ports: list[int]
    fabric: bool
    shares_memory: bool


class MPITransport(Transport):
    """Transport over MPI between the ranks of one communicator.

    Without communicators it waits for the other ranks, and takes duplicates of ``COMM_WORLD``; it
    raises what :func:`~asyncddp.transport.selection.open_transport` does.
    """

    name = "mpi"
    started_by_mpi = True
    remote_path = (
        "straight from the tensor's memory; over TCP in pieces of 60 KB, and sums in parts by the "
        "machines, each summed by shared memory first"
    )
    _machine_buffers: SharedCollectiveBuffers | None = None

    def __init__(
        self, pair: CommunicatorPair | None = None, startup: StartupDeadline | None = None
    ) -> None:
        if pair is None:
            start_and_synchronize(startup or StartupDeadline.for_single_process())
        level = MPI.Query_thread()
        if level < MPI.THREAD_FUNNELED:
            raise EnvironmentProblem(
                "MPI was initialised with MPI_THREAD_SINGLE, which this library cannot use. Let "
                "mpi4py initialise it, or ask for MPI_THREAD_MULTIPLE in your own MPI_Init_thread."
            )
        self.allows_threads = level >= MPI.THREAD_SERIALIZED
        self._world = pair is None
        self._pair = acquire_world_pair() if pair is None else pair
        self._comm, self._bulk = self._pair.comm, self._pair.bulk
        self._tensors = MPIPointToPoint(self._pair, bulk=True)
        self._collectives: MessageCollectives | None = None  # of large tensors over TCP
        self._running = RunningCollectives(self._advance, _check_nothing, self.break_collectives)
        self.rank, self.size = self._comm.rank, self._comm.size
        self._pending_sends: list[tuple[MPI.Request, bytes]] = []
        self._status = MPI.Status()
        self._send_queues: TCPSendQueueLimit | None = None
        self._pause = PollingPause(cores_shared=True)  # until machine_id() knows more
        self._closed = False

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all processes of the job."""
        return cls(startup=startup)

    @translate_mpi_errors
    def post(self, peer: int, message: bytes) -> None:
        """Send the message by Isend; its bytes are kept until MPI has sent them."""
        if len(self._pending_sends) > 16:
            self._release_completed()
        request = self._comm.Isend([message, MPI.BYTE], peer, _MESSAGE_TAG)
        self._pair.sent[0][peer] += 1
        self._pending_sends.append((request, message))

    @translate_mpi_errors
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Receive every message that a matching probe finds, from any rank."""
        came = []
        while (found := self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, self._status)) is not None:
            message = bytearray(self._status.Get_count(MPI.BYTE))
            source = self._status.Get_source()
            found.Recv([message, MPI.BYTE])
            self._pair.received[0][source] += 1
            came.append((source, bytes(message)))
            if self._send_queues is not None:
                self._send_queues.connected(source)
        self._running.advance()
        if self._pair.abandoned:
            self._release_completed()
        return came

    @override
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.isend(data, peer, tag)

    @override
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.irecv(out, peer, tag)

    def _message_collectives(self, tensor: torch.Tensor) -> MessageCollectives | None:
        """Return what sums or gathers over TCP by sends and receives of many pieces at once.

        With many ranks MPI takes fewer messages for a small one, though more of them in a row.
        """
        if self._collectives is None or (tensor.nbytes <= SHORT_BYTES and self.size > FEW_RANKS):
            return None
        self.require_collectives()
        return self._collectives

    def _collective(
        self,
        start: Callable[[Any], MPI.Request],
        pieces: Sequence[Any],
        finish: Callable[[], object] | None = None,
    ) -> Request:
        """Start a collective for each piece, the same number on all ranks."""
        self.require_collectives()
        self._pair.collectives += 1
        self._pair.pending_collectives += 1
        started = [start(piece) for piece in pieces]
        return MPICollectiveRequest(self._pair, started, pieces, finish, self.break_collectives)

    @override
    @translate_mpi_errors
    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        into = tensor if out is None else out
        if (collectives := self._message_collectives(tensor)) is not None:
            return collectives.allreduce(tensor, into, divisor)
        datatype, operation = _mpi_reduction(tensor.dtype)
        same = into.data_ptr() == tensor.data_ptr()

        def start(pair: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]) -> MPI.Request:
            count = pair[0].size // tensor.element_size()
            given: Any = MPI.IN_PLACE if same else [pair[0], count, datatype]
            return self._comm.Iallreduce(given, [pair[1], count, datatype], operation)

        pieces = list(zip(cut(tensor), cut(into), strict=True))
        return self._collective(start, pieces, _division(into, divisor))

    @override
    @translate_mpi_errors
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        if (collectives := self._message_collectives(tensor)) is not None:
            return collectives.reduce_scatter(tensor, out, divisor)
        datatype, operation = _mpi_reduction(tensor.dtype)
        # larger tensors are copied in blocks of columns
        step = max(1, LARGEST_PIECE // (self.size * tensor.element_size()))

        def start(pair: tuple[torch.Tensor, torch.Tensor]) -> MPI.Request:
            count = pair[1].numel()  # per part: mpi4py counts what is sent in the same way
            given, taken = ([as_bytes(side).numpy(), count, datatype] for side in pair)
            return self._comm.Ireduce_scatter_block(given, taken, operation)

        parts = torch.split(tensor.view(self.size, out.numel()), step, dim=1)
        columns = [part.contiguous() for part in parts]
        pairs = list(zip(columns, torch.split(out, step), strict=True))
        return self._collective(start, pairs, _division(out, divisor))

    @override
    @translate_mpi_errors
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        return self._collective(
            lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), cut(tensor)
        )

    @override
    @translate_mpi_errors
    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        if (collectives := self._message_collectives(out)) is not None:
            return collectives.allgather(tensor, out, counts)
        if out.nbytes > _MAX_COUNT:
            raise ArgumentError(
                f"allgather of {out.nbytes} bytes in all: expected at most {_MAX_COUNT}, which MPI "
                "can count; gather the tensor in parts"
            )
        size = tensor.element_size()
        given = [as_bytes(tensor).numpy(), MPI.BYTE]
        taken = [as_bytes(out).numpy(), [count * size for count in counts], MPI.BYTE]
        return self._collective(lambda both: self._comm.Iallgatherv(*both), [(given, taken)])

    @override
    @translate_mpi_errors
    def ibarrier(self) -> Request:
        return self._collective(lambda _: self._comm.Ibarrier(), [None])

    @override
    def split(self, color: int, key: int) -> Transport:
        return MPITransport(self._pair.split(color, key))

    @override
    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        return MPITransport(self._pair.split_members(ranks, tag))

    @override
    @translate_mpi_errors
    def probe(self, tag: int) -> int | None:
        status = MPI.Status()
        found = self._bulk.Iprobe(MPI.ANY_SOURCE, tag, status)
        return status.Get_source() if found else None

    @translate_mpi_errors
    def machine_id(self) -> int:
        """Return the lowest rank here; learn which peers are here, and if cores are shared."""
        mine = self.rank, sorted(os.sched_getaffinity(0))
        near = dict(allgather_records(self._pair.machine, mine, tuple[int, list[int]]))
        self.cores_shared = outnumber_cores(near.values())
        self._pause = PollingPause(cores_shared=self.cores_shared)
        self._find_network(frozenset(near))
        return min(near)

    def _advance(self) -> None:
        self._running.advance()

    def _find_network(self, near: frozenset[int]) -> None:
        """Learn whether other machines are reached by TCP, and by which ports."""
        alone = len(near) == self.size  # the kernel takes milliseconds to list all sockets
        ports = [] if alone else listening_ports()
        own = _NetworkRecord(min(near), ports, _FABRIC.is_dir(), self._machine_buffers is not None)
        every = allgather_records(self._comm, own, _NetworkRecord)
        if alone or any(record.fabric for record in every):
            return
        far = {peer: every[peer].ports for peer in range(self.size) if peer not in near}
        self._send_queues = TCPSendQueueLimit(ports, far)
        parts = MPIPointToPoint(self._pair, bulk=False)
        self._tensors.same_host = parts.same_host = near
        machines: dict[int, list[int]] = {}
        for peer, record in enumerate(every):
            machines.setdefault(record.machine, []).append(peer)
        self._collectives = MessageCollectives(
            parts, self.rank, list(machines.values()), _COLLECTIVE_TAGS, self._running
        )
        if all(record.shares_memory for record in every):
            self._collectives.sum_by_machines(self._machine_buffers)

    def backoff(self, attempt: int, *, background: bool = False) -> None:
        """Spin if no core is shared, then yield, then sleep; in the background only sleep."""
        self._pause.pause(attempt, background=background)

    def close(self) -> None:
        """Wait a second at most for posted messages; the next ``init()`` reuses communicators."""
        if self._closed or MPI.Is_finalized():
            return
        self._closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while self._pending_sends and time.monotonic() < deadline:
            time.sleep(SLEEP_SECONDS)
            self._release_completed()
        self._pair.release(world=self._world)
        _DRAINING.append(self)
        for transport in _DRAINING[:]:
            transport._release_completed()
            if not (transport._pending_sends or transport._pair.abandoned):
                _DRAINING.remove(transport)

    @translate_mpi_errors
    def _release_completed(self) -> None:
        self._pending_sends = [pair for pair in self._pending_sends if not pair[0].Test()]
        kept = [request for request in self._pair.abandoned if not has_ended(request)]
        self._pair.abandoned = kept

    @override
    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)


_DRAINING: list[MPITransport] = []
"""Closed transports whose buffers MPI still uses."""


def _check_nothing() -> None:
    """Leave it to MPI to find out that a rank is gone."""


def _division(total: torch.Tensor, divisor: int | None) -> Callable[[], object] | None:
    return None if divisor is None else partial(total.div_, divisor)


def _mpi_reduction(dtype: torch.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    return getattr(MPI, DTYPES[dtype].mpi), MPI.LOR if dtype == torch.bool else MPI.SUM
