"""MPI transport through mpi4py, on private duplicates of COMM_WORLD."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.base import Request, Transport, has_ended, is_short
from asyncddp.transport.collective_algorithms import FEW_RANKS
from asyncddp.transport.collective_request import RunningCollectives
from asyncddp.transport.message_collectives import MessageCollectives
from asyncddp.transport.mpi.communicator_pair import (
    CommunicatorPair,
    acquire_world_pair,
    allgather_records,
)
from asyncddp.transport.mpi.mpi_collectives import MPICollectives
from asyncddp.transport.mpi.point_to_point import MPIPointToPoint
from asyncddp.transport.mpi.runtime import MPI, is_process_failure, translate_mpi_errors
from asyncddp.transport.mpi.startup import start_and_synchronize
from asyncddp.transport.polling_pause import SLEEP_SECONDS, PollingPause, outnumber_cores
from asyncddp.transport.process_transport import Collectives, ProcessTransport
from asyncddp.transport.startup_deadline import StartupDeadline
from asyncddp.transport.tcp_send_queue import TCPSendQueueLimit, listening_ports

_MESSAGE_TAG = 0
_COLLECTIVE_TAGS = range(1, 1 << 15)
_FABRIC = Path("/sys/class/infiniband")  # exists where the network is not TCP
_CLOSE_TIMEOUT = 1.0  # seconds in which close() tries to send the last messages


class _NetworkRecord(NamedTuple):
    """Record of a rank's machine: lowest rank, open ports, high-speed fabric, shared buffers."""

    machine: int
    ports: list[int]
    fabric: bool
    shares_memory: bool


class MPITransport(ProcessTransport):
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
        self._of_mpi = MPICollectives(self._pair, self.break_collectives)
        self._running = RunningCollectives(self._advance, _check_nothing, self.break_collectives)
        self.rank, self.size = self._comm.rank, self._comm.size
        self._failed: dict[int, str] = {}  # ranks that MPI knows to have failed, and how
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
        """Send the message by Isend; keep its bytes until MPI has sent them."""
        if len(self._pending_sends) > 16:
            self._release_completed()
        try:
            request = self._comm.Isend([message, MPI.BYTE], peer, _MESSAGE_TAG)
        except MPI.Exception as error:
            self._acknowledge_failure(error)
            return
        self._pair.sent[0][peer] += 1
        self._pending_sends.append((request, message))

    @translate_mpi_errors
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Receive every message that a matching probe finds, from any rank."""
        came = []
        while (found := self._next_message()) is not None:
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

    def _next_message(self) -> MPI.Message | None:
        try:
            return self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, self._status)
        except MPI.Exception as error:
            self._acknowledge_failure(error)
            return None

    def _acknowledge_failure(self, error: MPI.Exception) -> None:
        """Record failed processes, so that MPI receives from the other ranks again."""
        if not is_process_failure(error):
            raise error
        self._comm.Ack_failed()
        self._bulk.Ack_failed()
        for peer in self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group()):
            self._failed.setdefault(peer, "MPI reports that its process has failed")

    @override
    def failed_peers(self) -> Mapping[int, str]:
        return self._failed

    @override
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.isend(data, peer, tag)

    @override
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.irecv(out, peer, tag)

    @override
    def _collectives_of(self, verb: str, nbytes: int) -> Collectives:
        """Choose between own collectives in overlapping pieces, over TCP, and MPI's.

        With many ranks MPI takes fewer messages for a small one, though more of them in a row.
        """
        few_messages = is_short(nbytes) and self.size > FEW_RANKS
        by_pieces = verb not in ("broadcast", "barrier") and not few_messages
        return (self._collectives if by_pieces else None) or self._of_mpi

    @override
    @translate_mpi_errors
    def _start(self, verb: str, nbytes: int, *given: Any) -> Request:
        return super()._start(verb, nbytes, *given)

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
        """Return the lowest rank here; find out which peers are here, and if cores are shared."""
        mine = self.rank, sorted(os.sched_getaffinity(0))
        near = dict(allgather_records(self._pair.machine, mine, tuple[int, list[int]]))
        self.cores_shared = outnumber_cores(near.values())
        self._pause = PollingPause(cores_shared=self.cores_shared)
        self._find_network(frozenset(near))
        return min(near)

    def _advance(self) -> None:
        self._running.advance()

    def _find_network(self, near: frozenset[int]) -> None:
        """Find out whether other machines are reached over TCP, and through which ports."""
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
        """Wait a second at most for posted messages; keep communicators for the next ``init()``."""
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
        self._pending_sends = [pair for pair in self._pending_sends if not _is_over(pair[0])]
        kept = [request for request in self._pair.abandoned if not has_ended(request)]
        self._pair.abandoned = kept

    @override
    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)


_DRAINING: list[MPITransport] = []
"""Closed transports whose buffers MPI still uses."""


def _is_over(request: MPI.Request) -> bool:
    """Tell whether a message was sent, or cannot be sent any more."""
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if not is_process_failure(error):
            raise
        return True


def _check_nothing() -> None:
    """Check nothing: MPI itself detects ranks that are gone."""
