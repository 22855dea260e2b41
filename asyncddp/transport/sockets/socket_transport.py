"""Socket transport: connects the ranks that a torch.distributed launcher has started.

The ranks find each other through a store of torch.distributed, and talk over sockets of their own:
the user's process groups stay free. The verbs of gloo are not used, since its ``isend`` and
``irecv`` can neither be tested nor cancelled, and a collective of gloo that one rank has given up
holds the others, and the end of the process, until the group's timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import select
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from typing_extensions import override

from asyncddp.membership import View
from asyncddp.shm.arena import Arena
from asyncddp.tensors.allocation import make_tensor
from asyncddp.transport.base import Request, SharedMemoryGroup, Transport
from asyncddp.transport.collective_request import RunningCollectives
from asyncddp.transport.message_collectives import MessageCollectives
from asyncddp.transport.polling_pause import PollingPause, outnumber_cores
from asyncddp.transport.process_transport import Collectives, ProcessTransport
from asyncddp.transport.record_gathering import gather_records
from asyncddp.transport.shared_memory.group_formation import RecordGatherer, form_group, subgroup
from asyncddp.transport.sockets.group_endpoint import GroupEndpoint
from asyncddp.transport.sockets.rendezvous import meet
from asyncddp.transport.sockets.replacement_join import ReplacementJoin
from asyncddp.transport.sockets.socket_mesh import SocketMesh
from asyncddp.transport.startup_deadline import StartupDeadline

T = TypeVar("T")
logger = logging.getLogger("asyncddp")

_TIMEOUT = 60.0  # seconds for collectives of its own
_TAGS = range(1 << 32)
_MAX_SELECTED = 1024  # descriptors that select() takes


class MeshGroup(NamedTuple):
    """Group of ranks on a socket mesh, with a unique name that is the same on all its ranks."""

    mesh: SocketMesh
    name: str
    members: Sequence[int]  # their ranks in the world
    shared_memory: SharedMemoryGroup | None = None


class SocketTransport(ProcessTransport):
    """Transport of one rank over sockets, and through shared memory inside a machine.

    Without a group it joins the world that the environment announces, or that
    ``torch.distributed.init_process_group`` has made; it raises what
    :func:`~asyncddp.transport.selection.open_transport` does.
    """

    name = "c10d"
    local_path = "read where they lie, or piece by piece out of shared memory"
    remote_path = (
        "straight from the tensor's memory; sums in parts by the machines, each summed by shared "
        "memory first"
    )

    def __init__(
        self, group: MeshGroup | None = None, startup: StartupDeadline | None = None
    ) -> None:
        self._world, joining = group is None, None
        if group is None:
            startup = startup or StartupDeadline.for_single_process()
            joining = ReplacementJoin(startup) if startup.config.replaces else None
            mesh = meet(startup) if joining is None else joining.mesh
            group = MeshGroup(mesh, mesh.world.name, range(mesh.size))
        self._mesh, self._group, self._lock = group.mesh, group, group.mesh.lock
        self.rank, self.size = group.members.index(group.mesh.rank), len(group.members)
        self._messages = GroupEndpoint(self._mesh, _number(group.name), group.members)
        self._tensors = GroupEndpoint(self._mesh, _number(f"{group.name}/t"), group.members)
        parts = _number(f"{group.name}/collectives")
        self._parts = GroupEndpoint(self._mesh, parts, group.members)
        self._running = running = RunningCollectives(
            self._progress, self._check_members, self.break_collectives
        )
        self._mesh.rounds.append(running.advance)
        machines = self._machines()
        self._collectives = MessageCollectives(self._parts, self.rank, machines, _TAGS, running)
        self._splits = itertools.count(1)
        self._member_splits: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._closed = False
        here = self._mesh.world.machine_ranks()
        self.cores_shared = outnumber_cores(self._mesh.world.records[rank].cores for rank in here)
        self._pause = PollingPause(cores_shared=self.cores_shared, sleep=self._sleep)
        self.shared_memory_group, self.joining = group.shared_memory, joining
        if joining is None:
            self._share_memory(machines if self._world else [range(self.size)])
        else:
            self.outside = joining.view
            processes = {rank: self._mesh.world.records[rank].process for rank in here}
            self.shared_memory_group = SharedMemoryGroup(Arena(), processes)

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all ranks of the world."""
        return cls(startup=startup)

    def _machines(self) -> list[list[int]]:
        """List the ranks of each machine, machines by their first ranks."""
        machines: dict[str, list[int]] = {}
        for rank, member in enumerate(self._group.members):
            machines.setdefault(self._mesh.world.records[member].machine, []).append(rank)
        return list(machines.values())

    def _share_memory(self, machines: Sequence[Sequence[int]]) -> None:
        """Set up shared memory with this machine's other ranks, if possible; collective."""
        here = next(machine for machine in machines if self.rank in machine)
        part = self if len(machines) == 1 else self._part(f"machine of {here[0]}", here)
        gather = partial(gather_records, part, timeout=_TIMEOUT)
        if self._world:
            self.shared_memory_group = self._form_group(gather, here)
        self._open_shared_memory(here, gather, partial(gather_records, self, timeout=_TIMEOUT))
        if len(machines) > 1:
            buffers = self._machine_buffers
            if all(gather_records(self, buffers is not None, bool, _TIMEOUT)):
                self._collectives.sum_by_machines(buffers)

    def _form_group(self, gather: RecordGatherer, here: Sequence[int]) -> SharedMemoryGroup | None:
        """Form the group of ranks that share memory; warn if they cannot; collective."""
        if len(here) == 1:
            return None
        found, problem = form_group(gather, self.rank)
        if problem is not None and self.rank == here[0]:
            logger.warning(
                "the ranks of this machine cannot share memory (%s); they exchange tensors over "
                "sockets instead, which is slower",
                problem,
            )
        return found

    def _progress(self) -> None:
        with self._mesh.lock:
            self._mesh.progress()

    def _check_members(self) -> None:
        for failed in self._mesh.failed:
            if failed in self._group.members and (error := self._mesh.error_of(failed)) is not None:
                raise error

    # messages

    def post(self, peer: int, message: bytes) -> None:
        """Queue the message for the peer, and send as much as the system accepts."""
        self._messages.post(peer, message)

    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Make progress, and return the messages that have arrived."""
        with self._mesh.lock:
            self._mesh.progress()
            inbox = self._messages.inbox
            return [inbox.popleft() for _ in range(len(inbox))]

    @override
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.isend(data, peer, tag)

    @override
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        return self._tensors.irecv(out, peer, tag)

    @override
    def failed_peers(self) -> Mapping[int, str]:
        failed, members = self._mesh.failed, self._group.members
        if not failed:
            return failed
        return {members.index(rank): failed[rank] for rank in list(failed) if rank in members}

    @override
    def has_ended(self, peer: int) -> bool:
        with self._mesh.lock:
            return self._mesh.losses.has_ended(self._group.members[peer])

    @override
    def pending_replacements(self) -> Iterable[tuple[int, bool]]:
        return self._mesh.pending_replacements.take_requests() if self._world else ()

    @override
    def answer_replacement(self, peer: int, view: View, refusal: str = "") -> None:
        with self._mesh.lock:
            self._mesh.answer(peer, view, refusal)

    @override
    def readmit(self, peer: int) -> None:
        with self._mesh.lock:
            self._mesh.readmit(peer)
            group = self.shared_memory_group
            if group is not None and peer in group.processes:
                group.processes[peer] = self._mesh.world.records[peer].process

    # collectives

    @override
    def _collectives_of(self, verb: str, nbytes: int) -> Collectives:
        return self._collectives

    @override
    def probe(self, tag: int) -> int | None:
        with self._mesh.lock:
            self._mesh.progress()
            return self._tensors.probe(tag)

    # groups

    def _part(
        self, name: str, members: Sequence[int], group: SharedMemoryGroup | None = None
    ) -> SocketTransport:
        world = [self._group.members[rank] for rank in members]
        return SocketTransport(MeshGroup(self._mesh, f"{self._group.name}/{name}", world, group))

    @override
    def split(self, color: int, key: int) -> Transport:
        mine = make_tensor([color, key], torch.int64)
        every = self.allgather(mine, [2] * self.size, _TIMEOUT).view(-1, 2).tolist()
        members = sorted(
            (rank for rank in range(self.size) if every[rank][0] == color),
            key=lambda rank: (every[rank][1], rank),
        )
        name = f"{next(self._splits)}:{color}"
        return self._part(name, members, subgroup(self.shared_memory_group, members))

    @override
    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        group = tag, tuple(ranks)
        self._member_splits[group] += 1
        name = f"members {group}:{self._member_splits[group]}"
        return self._part(name, ranks, subgroup(self.shared_memory_group, ranks))

    def machine_id(self) -> int:
        """Return the lowest rank of the group on this machine, known from the world's records."""
        here = self._mesh.world.machine_ranks()
        return next(rank for rank, member in enumerate(self._group.members) if member in here)

    @override
    def machine_ids(self) -> list[int]:
        places = {rank: machine[0] for machine in self._machines() for rank in machine}
        return [places[rank] for rank in range(self.size)]

    # waiting, and the end

    def backoff(self, attempt: int, *, background: bool = False) -> None:
        """Spin if no core is shared, then yield, then sleep until something comes."""
        self._pause.pause(attempt, background=background)

    def _sleep(self, seconds: float) -> None:
        descriptor = self._mesh.wakeup_descriptor
        if self._mesh.closed or descriptor >= _MAX_SELECTED:
            time.sleep(seconds)
            return
        with contextlib.suppress(OSError):  # another thread has closed it
            select.select([descriptor], [], [], seconds)

    def close(self) -> None:
        """Send the last messages; the transport of the whole world also closes its connections."""
        if self._closed:
            return
        self._closed = True
        with self._mesh.lock:
            if self._world:
                self._mesh.close()
            else:
                for endpoint in (self._messages, self._tensors, self._parts):
                    endpoint.close()
                self._mesh.rounds.remove(self._running.advance)
            self._close_shared_memory(world=self._world)

    @override
    def abort(self, code: int) -> None:
        with self._mesh.lock:
            self._mesh.tell_of_failure(self._mesh.rank, f"it has ended with exit code {code}")
            self._mesh.flush_for(1.0)
        os._exit(code)


def _number(name: str) -> int:
    """Return a group's number for frame headers."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
