"""Shared-memory transport: shared memory among the ranks of a machine, MPI for the rest."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from asyncddp.errors import EnvironmentProblem
from asyncddp.shm.arena import Arena, SharedMemoryHandle, handle_of_block
from asyncddp.transport.base import (
    COLLECTIVE_GIVEN_UP,
    Request,
    Scope,
    SharedMemoryGroup,
    Transport,
    collectives_broken,
)
from asyncddp.transport.mpi.communicator_pair import CommunicatorPair, allgather_records
from asyncddp.transport.mpi.mpi_transport import MPITransport
from asyncddp.transport.mpi.runtime import MPI
from asyncddp.transport.shared_memory.shared_memory_reductions import (
    MIN_BYTES,
    SharedMemoryAllreduce,
    SharedMemoryReduceScatter,
    SharedReductionBuffers,
)
from asyncddp.transport.startup_deadline import StartupDeadline

logger = logging.getLogger("asyncddp")

_MAGIC = 0x41_44_44_50


class _MappingProbe(NamedTuple):
    """Process id of a rank, and the shared page by which others test if they can map its memory."""

    rank: int
    process: int
    page: SharedMemoryHandle | None


class SharedMemoryTransport(MPITransport):
    """Transport over MPI that uses shared memory among the ranks of each machine.

    Short messages, and messages to other machines, go by MPI. A rank whose machine does not let
    processes map each other's memory has :attr:`shared_memory_group` None and uses MPI alone.

    Without communicators the ranks find out which of them share memory; where none can that is an
    error if it is ``required``, and else a warning.

    Raises:
        EnvironmentProblem: Memory cannot be shared, but is required.
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
            self.shared_memory_group, problem = _form_group(self._comm)
            if problem is not None:
                self._report_unavailable(problem, required=required)
        self._reduction_buffers = self._open_reduction_buffers()

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all processes of the job."""
        return cls(startup=startup, required=required)

    def _open_reduction_buffers(self) -> SharedReductionBuffers | None:
        """Allocate the buffers of reductions, if all ranks share memory; collective."""
        group = self.shared_memory_group
        if group is None or len(group.processes) < max(2, self._comm.size):
            return None
        return SharedReductionBuffers(
            group,
            self.rank,
            lambda handle: allgather_records(self._comm, handle, SharedMemoryHandle),
        )

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start an allreduce: of large tensors through shared memory, where all ranks share it."""
        buffers = self._reduction_buffers_for(tensor)
        if buffers is None:
            return super().iallreduce(tensor, out, divisor)
        into = tensor if out is None else out
        return SharedMemoryAllreduce(buffers, tensor, into, divisor, self._mark_broken)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start a reduce-scatter: of large tensors through shared memory, where all share it."""
        buffers = self._reduction_buffers_for(tensor)
        if buffers is None:
            return super().ireduce_scatter(tensor, out, divisor)
        return SharedMemoryReduceScatter(buffers, tensor, out, divisor, self._mark_broken)

    def _reduction_buffers_for(self, tensor: torch.Tensor) -> SharedReductionBuffers | None:
        """Return the buffers for reducing a tensor; None where MPI reduces it."""
        if (
            self._reduction_buffers is None
            or tensor.nbytes < MIN_BYTES
            or tensor.dtype == torch.bool
        ):
            return None
        if self.broken:
            raise collectives_broken(self.broken)
        return self._reduction_buffers

    def _mark_broken(self) -> None:
        """Refuse further collectives, after one was abandoned."""
        self.broken = COLLECTIVE_GIVEN_UP

    def _report_unavailable(self, problem: str, *, required: bool) -> None:
        """Raise or warn because memory cannot be shared."""
        text = f"the ranks of this machine cannot share memory ({problem})"
        if required:
            raise EnvironmentProblem(f"transport shared_memory: {text}; use ASYNCDDP_TRANSPORT=mpi")
        if self.machine_id() == self.rank:
            logger.warning("%s; they exchange tensors by MPI instead, which is slower", text)

    def close(self) -> None:
        """Wait until posted messages are sent, and free shared memory that no tensor uses."""
        super().close()
        if self._world and self.shared_memory_group is not None:
            self.shared_memory_group.arena.close()
            self.shared_memory_group = None
        self._reduction_buffers = None

    def split(self, color: int, key: int) -> Transport:
        """Split the communicators; ranks that share memory do so in the parts as well."""
        part = self._pair.split(color, key)
        members = allgather_records(part.comm, self.rank, int)
        known = self.shared_memory_group
        if known is None or not all(rank in known.processes for rank in members):
            return MPITransport(part)
        processes = {new_rank: known.processes[rank] for new_rank, rank in enumerate(members)}
        return SharedMemoryTransport(part, SharedMemoryGroup(known.arena, processes))


def _form_group(comm: MPI.Intracomm) -> tuple[SharedMemoryGroup | None, str | None]:
    """Map each other's test pages; return the group, or why memory cannot be shared; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    try:
        arena, page, problem = Arena(), None, None
        if node.size > 1:
            page, problem = _publish_test_page(arena)
        entries = allgather_records(
            node, _MappingProbe(comm.rank, os.getpid(), page), _MappingProbe
        )
        processes = {rank: process for rank, process, _ in entries}
        problem = problem or _verify_test_pages(
            arena, [(process, page) for _, process, page in entries]
        )
        problems = [text for text in allgather_records(node, problem or "", str) if text]
        if node.size == 1 or problems:
            return None, problems[0] if problems else None
        return SharedMemoryGroup(arena, processes), None
    finally:
        node.Free()


def _publish_test_page(arena: Arena) -> tuple[SharedMemoryHandle | None, str | None]:
    """Write a test page; return its handle, or why shared memory cannot be allocated."""
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    try:
        block = arena.take(64)
    except OSError as error:
        return None, f"memfd_create: {error}"
    block.chunk.words(block.offset, 1)[0] = _MAGIC + os.getpid()
    return handle_of_block(block), None


def _verify_test_pages(
    arena: Arena, pages: list[tuple[int, SharedMemoryHandle | None]]
) -> str | None:
    """Map and read the other ranks' test pages; return why that failed, or None."""
    for process, page in pages:
        if page is None:
            continue
        try:
            word = arena.open(process, page).words(page.offset, 1)[0]
        except (OSError, ValueError) as error:
            return f"process {process} is out of sight: {error}"
        if word != _MAGIC + process:
            return f"process {process} lives in another process namespace"
    return None
