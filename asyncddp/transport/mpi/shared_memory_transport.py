"""Shared-memory transport: shared memory inside each machine, MPI between machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.base import Scope, SharedMemoryGroup, Transport
from asyncddp.transport.mpi.communicator_pair import CommunicatorPair, allgather_records
from asyncddp.transport.mpi.mpi_transport import MPITransport
from asyncddp.transport.shared_memory.group_formation import form_group, subgroup
from asyncddp.transport.startup_deadline import StartupDeadline

T = TypeVar("T")
logger = logging.getLogger("asyncddp")


class SharedMemoryTransport(MPITransport):
    """Transport over MPI that uses shared memory between the ranks of each machine.

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
            problem = self._form_group()
            text = f"the ranks of this machine cannot share memory ({problem})"
            if problem is not None and required:
                raise EnvironmentProblem(
                    f"transport shared_memory: {text}; use ASYNCDDP_TRANSPORT=mpi"
                )
            if problem is not None and self._pair.machine.rank == 0:
                logger.warning("%s; they exchange tensors by MPI instead, which is slower", text)
        comm, members = self._comm, list(range(self.size))
        if self._world:
            comm, group = self._pair.machine, self.shared_memory_group
            members = [] if group is None else list(group.ranks)
        gather = partial(allgather_records, self._comm)
        self._open_shared_memory(members, partial(allgather_records, comm), gather)

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all processes of the job."""
        return cls(startup=startup, required=required)

    def _form_group(self) -> str | None:
        """Form the group of ranks that share memory; else return the reason; collective."""
        machine = self._pair.machine
        if machine.size == 1:
            return None
        gather = partial(allgather_records, machine)
        self.shared_memory_group, problem = form_group(gather, self.rank)
        return problem

    def close(self) -> None:
        """Wait until posted messages are sent, and free shared memory that no tensor uses."""
        super().close()
        self._close_shared_memory(world=self._world)

    def split(self, color: int, key: int) -> Transport:
        """Split the communicators; ranks that share memory also do so in the parts."""
        return self._part(self._pair.split(color, key))

    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Make communicators for the ranks, which share memory there if they do here."""
        return self._part(self._pair.split_members(ranks, tag))

    def _part(self, part: CommunicatorPair) -> Transport:
        """Return the transport over some ranks' communicators; collective over these."""
        members = allgather_records(part.comm, self.rank, int)
        group = subgroup(self.shared_memory_group, members)
        return MPITransport(part) if group is None else SharedMemoryTransport(part, group)
