"""Shared-memory transport: shared memory among the ranks of a machine, MPI for the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncddp.errors import EnvironmentProblem
from asyncddp.shm.arena import Arena, SharedMemoryHandle, handle_of_block
from asyncddp.transport.base import Request, Scope, SharedMemoryGroup, Transport
from asyncddp.transport.mpi.communicator_pair import CommunicatorPair, allgather_records
from asyncddp.transport.mpi.mpi_transport import MPITransport
from asyncddp.transport.mpi.runtime import MPI
from asyncddp.transport.shared_memory.shared_memory_reductions import (
    MIN_BYTES,
    SharedMemoryAllreduceRequest,
    SharedMemoryReduceScatterRequest,
    SharedReductionBuffers,
)
from asyncddp.transport.startup_deadline import StartupDeadline

logger = logging.getLogger("asyncddp")

_MAGIC = 0x41_44_44_50


class _MappingTestPage(NamedTuple):
    """Process id of a rank, and the shared page by which others test if they can map its memory."""

    rank: int
    process: int
    page: SharedMemoryHandle | None


class SharedMemoryTransport(MPITransport):
    """Transport over MPI that uses shared memory among the ranks of each machine.

    Short messages, and messages to other machines, go by MPI. Without communicators the ranks find
    out which of them share memory; a rank that cannot has :attr:`shared_memory_group` None and uses
    MPI alone, with a warning, or an EnvironmentProblem if shared memory is ``required``.
    """

    name = "shared_memory"
    scope = Scope.MACHINE
    messages_by = MPITransport.name
    local_path = "read where they lie, or piece by piece out of shared memory"

    def __init__(
        self,
        pair: CommunicatorPair | None = None,
        shared_memory_group: SharedMemoryGroup | None = None,
        startup: StartupDeadline | None = None,
        *,
        required: bool = True,
    ) -> None:
        super().__init__(pair, startup)
        self.shared_memory_group = shared_memory_group
        if pair is None:
            self.shared_memory_group, problem = _form_group(self._pair.machine, self.rank)
            text = f"the ranks of this machine cannot share memory ({problem})"
            if problem is not None and required:
                raise EnvironmentProblem(
                    f"transport shared_memory: {text}; use ASYNCDDP_TRANSPORT=mpi"
                )
            if problem is not None and self.machine_id() == self.rank:
                logger.warning("%s; they exchange tensors by MPI instead, which is slower", text)
        self._reduction_buffers = self._open_reduction_buffers()

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all processes of the job."""
        return cls(startup=startup, required=required)

    def _open_reduction_buffers(self) -> SharedReductionBuffers | None:
        """Allocate the buffers of reductions, if all ranks share memory; collective."""
        group, comm = self.shared_memory_group, self._comm
        if group is None or len(group.processes) < max(2, comm.size):
            return None
        return SharedReductionBuffers(
            group,
            self.rank,
            lambda handle: allgather_records(comm, handle, SharedMemoryHandle),
            self.break_collectives,
        )

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start an allreduce: of large tensors through shared memory, where all ranks share it."""
        buffers = self._reduction_buffers_for(tensor)
        if buffers is None:
            return super().iallreduce(tensor, out, divisor)
        into = tensor if out is None else out
        return SharedMemoryAllreduceRequest(buffers, tensor, into, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start a reduce-scatter: of large tensors through shared memory, where all share it."""
        buffers = self._reduction_buffers_for(tensor)
        if buffers is None:
            return super().ireduce_scatter(tensor, out, divisor)
        return SharedMemoryReduceScatterRequest(buffers, tensor, out, divisor)

    def _reduction_buffers_for(self, tensor: torch.Tensor) -> SharedReductionBuffers | None:
        """Return the buffers for reducing a tensor; None where MPI reduces it."""
        small = tensor.nbytes < MIN_BYTES or tensor.dtype == torch.bool
        if self._reduction_buffers is None or small:
            return None
        self.require_collectives()
        return self._reduction_buffers

    def close(self) -> None:
        """Wait until posted messages are sent, and free shared memory that no tensor uses."""
        super().close()
        if self._world and self.shared_memory_group is not None:
            self.shared_memory_group.arena.close()
            self.shared_memory_group = None
        self._reduction_buffers = None

    def split(self, color: int, key: int) -> Transport:
        """Split the communicators; ranks that share memory do so in the parts as well."""
        return self._part(self._pair.split(color, key))

    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Make communicators for the ranks, which share memory there as well if they do here."""
        return self._part(self._pair.split_members(ranks, tag))

    def _part(self, part: CommunicatorPair) -> Transport:
        """Return the transport over some ranks' communicators; collective over these."""
        members = allgather_records(part.comm, self.rank, int)
        known = self.shared_memory_group
        if known is None or not all(rank in known.processes for rank in members):
            return MPITransport(part)
        processes = {new_rank: known.processes[rank] for new_rank, rank in enumerate(members)}
        return SharedMemoryTransport(part, SharedMemoryGroup(known.arena, processes))


def _form_group(machine: MPI.Intracomm, rank: int) -> tuple[SharedMemoryGroup | None, str | None]:
    """Map each other's test pages; return the group, or why memory cannot be shared; collective."""
    if machine.size == 1:
        return None, None
    arena = Arena()
    page, problem = _publish_test_page(arena)
    mine = _MappingTestPage(rank, os.getpid(), page)
    pages = allgather_records(machine, mine, _MappingTestPage)
    problems = allgather_records(machine, problem or _verify_test_pages(arena, pages), str)
    if any(problems):
        return None, next(filter(None, problems))
    return SharedMemoryGroup(arena, {one.rank: one.process for one in pages}), None


def _publish_test_page(arena: Arena) -> tuple[SharedMemoryHandle | None, str]:
    """Write a test page; return its handle, or why shared memory cannot be allocated."""
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    try:
        block = arena.take(64)
    except OSError as error:
        return None, f"memfd_create: {error}"
    block.chunk.words(block.offset, 1)[0] = _MAGIC + os.getpid()
    return handle_of_block(block), ""


def _verify_test_pages(arena: Arena, pages: list[_MappingTestPage]) -> str:
    """Map and read the other ranks' test pages; return why that failed, or nothing."""
    for _, process, page in pages:
        if page is None:
            continue
        try:
            word = arena.open(process, page).words(page.offset, 1)[0]
        except (OSError, ValueError) as error:
            return f"process {process} is out of sight: {error}"
        if word != _MAGIC + process:
            return f"process {process} lives in another process namespace"
    return ""
