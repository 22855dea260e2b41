"""Context of one rank (transport, topologies, progress engine), and access to the current one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import torch

from asyncddp.config import Config
from asyncddp.context.clock_sync import ClockSync, measure_clock_offset
from asyncddp.context.topologies import Topologies
from asyncddp.engine import ProgressEngine
from asyncddp.engine.messages import MACHINE_COLLECTIVE
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.errors import NotInitializedError
from asyncddp.membership import View
from asyncddp.tensors.allocation import make_tensor
from asyncddp.timeline.tracer import Tracer, create_tracer
from asyncddp.transport import Transport
from asyncddp.transport.cuda.capabilities import default_device_index
from asyncddp.transport.cuda.negotiation import close_device_transports, negotiate_from_config

EVERYONE, MACHINE = "process group of all ranks", "process group of the machine"
"""Names of a context's extensions that are process groups of its members."""


@dataclass(frozen=True)
class MachineLayout:
    """Assignment of ranks to machines."""

    members: tuple[tuple[int, ...], ...]  # machines by their first rank, their ranks ascending
    recording: tuple[int, ...] = ()  # ranks that have a timeline, ascending
    rank_on_host: int = 0  # ranks before this one that share its host, also where it simulates some
    all_see_gpus: bool = False

    @classmethod
    def of(cls, transport: Transport, config: Config) -> MachineLayout:
        """Gather each rank's machine, and if it records a timeline and sees a GPU; collective."""
        per, rank, host = config.ranks_per_machine, transport.rank, transport.machine_id()
        if transport.outside is not None:  # among ranks that do not wait for it
            hosts = transport.machine_ids()
            ids = hosts if per is None else [other // per for other in range(transport.size)]
            return cls._of_machines(ids, hosts, rank)
        machine_id = rank // per if per is not None else host
        mine = (machine_id, host, config.timeline is not None, torch.cuda.device_count() > 0)
        facts = make_tensor([int(fact) for fact in mine], torch.int64)
        found = transport.allgather(facts, [4] * transport.size, config.timeout)
        machines, hosts, record, gpus = found.reshape(-1, 4).T.tolist()
        recording = tuple(compress(range(transport.size), record))
        return replace(
            cls._of_machines(machines, hosts, rank), recording=recording, all_see_gpus=all(gpus)
        )

    @classmethod
    def _of_machines(
        cls, machines: Sequence[int], hosts: Sequence[int], rank: int
    ) -> MachineLayout:
        members: dict[int, list[int]] = {}
        for other, machine in enumerate(machines):
            members.setdefault(machine, []).append(other)
        before = hosts[:rank].count(hosts[rank])
        return cls(tuple(map(tuple, members.values())), rank_on_host=before)

    def machine_of(self, rank: int) -> int:
        """Return the number of a rank's machine."""
        return next(m for m, ranks in enumerate(self.members) if rank in ranks)

    def restricted_to(self, ranks: Sequence[int]) -> MachineLayout:
        """Return the layout of a subset of ranks, renumbered from 0.

        Example:
            >>> MachineLayout(((0, 1), (2, 3))).restricted_to([1, 2, 3]).members
            ((0,), (1, 2))
        """
        place = {rank: number for number, rank in enumerate(ranks)}
        machines = [tuple(place[rank] for rank in m if rank in place) for m in self.members]
        machines = [ranks for ranks in machines if ranks]
        return replace(self, members=tuple(machines), recording=())

    @property
    def homogeneous(self) -> bool:
        """True if machines have equally many ranks, numbered consecutively by machine."""
        flat = [rank for machine in self.members for rank in machine]
        return len({len(m) for m in self.members}) == 1 and flat == sorted(flat)


class Context:
    """State of one rank from ``init()`` to ``shutdown()``: its number, topologies, progress engine.

    :func:`asyncddp.current` returns it.

    Args:
        transport: The transport between all ranks.
        config: Its settings.
        machines: Which ranks are on which machine; None asks the machines.
        agreement: Says which ranks take part in an elastic run; None lets them agree on it.

    Attributes:
        rank, size: This rank, and how many there are.
        local_rank, local_size: The same among the ranks of this machine.
        machine_rank, machine_size: This machine, and how many there are.
        tracer: Records the timeline; None if there is none.
        device_choice: The transport for tensors on GPUs, and why a requested one was not taken.

    Raises:
        ArgumentError: The timeline cannot be written where the settings say.
        UnknownNameError: The settings name an unknown transport for GPUs.
        MismatchError: Ranks request different transports for GPUs, or only some see GPUs.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        machines: MachineLayout | None = None,
        tracer: Tracer | None = None,
        agreement: ReplicaAgreement | None = None,
    ) -> None:
        self.transport, self.config = transport, config
        self.rank, self.size = transport.rank, transport.size
        self.tracer = create_tracer(config, self.rank, self.size) if tracer is None else tracer
        found = MachineLayout.of(transport, config)  # tells the transport who is near, too
        self.machines = found if machines is None else machines
        members, recording = self.machines.members, self.machines.recording
        self.machine_size = len(members)
        self.machine_rank = self.machines.machine_of(self.rank)
        self.local_ranks = members[self.machine_rank]
        self.local_size = len(self.local_ranks)
        self.local_rank = self.local_ranks.index(self.rank)
        self.local_transport = (
            transport.split(self.machine_rank, self.rank)
            if transport.outside is None
            else transport.split_members([self.rank], 0)
        )
        transport.device_watches = self.local_transport.device_watches = []
        self.default_gpu = default_device_index(self.machines.rank_on_host)
        """Index of the GPU that this rank uses by default; None where torch sees none."""
        self.device_choice = negotiate_from_config(
            transport,
            config,
            machine=self.machine_rank,
            rank_on_host=self.machines.rank_on_host,
            all_see_gpus=self.machines.all_see_gpus,
            part=self.local_transport,
        )
        self.topologies = Topologies(self.size, self.machine_size, self.rank)
        first = measure_clock_offset(transport, recording, config.timeout)
        self.engine = ProgressEngine(transport, config, self.tracer, agreement)
        if self.engine.membership is not None:
            self.topologies.view_at = self.engine.membership.view_at
            self.engine.on_view.append(self._enter_view)
            self.topologies.enter(self.engine.membership.view)
        local_slots = self.local_transport.collective_slots
        if local_slots is not None:
            local_slots.ranks = self.local_ranks
            self.engine.matcher.slots[MACHINE_COLLECTIVE] = local_slots
        self._clock = ClockSync(self.engine, self.tracer, first) if recording else None
        self.extensions: dict[str, Any] = {}  # per-rank state of higher layers, by their name
        self.failures: dict[int, str] = {}
        self.parts: list[tuple[Sequence[int], Context]] = []  # of groups, with their ranks here
        self.group_transports: list[Transport] = []  # of groups that live in this context
        # of higher layers, which wait for pending messages before this rank leaves
        self.exit_callbacks: list[Callable[[], None]] = []

    @property
    def members(self) -> Sequence[int]:
        """Ranks that take part, ascending: all of them, but for those that have left."""
        membership = self.engine.membership
        return range(self.size) if membership is None else membership.view.members

    @property
    def view_alone(self) -> View | None:
        """View of this rank alone, on one that joins a run, until it takes part."""
        membership = self.engine.membership
        return None if membership is None or self.transport.joining is None else membership.view

    @property
    def is_first(self) -> bool:
        """True on the lowest of the ranks that take part, which writes what one of them writes."""
        return self.rank == self.members[0]

    @property
    def is_first_on_machine(self) -> bool:
        """True on the lowest of the ranks of this machine that take part."""
        return self.rank == next(rank for rank in self.local_ranks if rank in self.members)

    def _enter_view(self, view: View) -> None:
        """Go on among the members of a new view."""
        self.topologies.enter(view)
        self.extensions.pop(EVERYONE, None)
        self.extensions.pop(MACHINE, None)

    def connect_neighbors(self) -> None:
        """Start connecting to the neighbours of all rounds, if GPU transports need it."""
        schedule = self.topologies.ranks
        for device_transport in (self.transport.device_transports or {}).values():
            for k in range(schedule.period or 1):
                near = schedule.neighbors(self.rank, k)
                with self.engine.lock:
                    device_transport.connect((*near.src_weights, *near.dst_ranks))

    def announce_exit(self, reason: str) -> None:
        """Tell the peers in all groups that this rank submits no more operations."""
        self.engine.announce_exit(reason)
        for _, part in self.parts:
            part.announce_exit(reason)

    def mark_failed(self, rank: int, reason: str) -> None:
        """Record that a rank has failed: operations that need it end in error, in all groups."""
        self.engine.lost_peers.mark_failed(rank, reason)
        self.failures[rank] = reason
        self.tell_parts_of_failures()

    def tell_parts_of_failures(self) -> None:
        """Pass known rank failures on to all groups, including groups created since."""
        for ranks, part in self.parts:
            for rank, reason in list(self.failures.items()):
                if rank in ranks:
                    part.mark_failed(ranks.index(rank), reason)

    def readmit_peers(self) -> None:
        """Forget which ranks have exited, in all groups."""
        self.failures.clear()
        self.engine.readmit_peers()
        for _, part in self.parts:
            part.readmit_peers()

    def close(self, reason: str) -> None:
        """Close all transports; harmless when called twice, and in a forked process."""
        if self.engine.forked:
            return
        try:
            while self.exit_callbacks:
                self.exit_callbacks.pop()()
        finally:
            try:
                if self._clock is not None:
                    self._clock.stop()
                self.engine.close(reason)
            finally:
                self.extensions.clear()
                self.parts.clear()
                every = *self.group_transports, self.local_transport, self.transport
                close_device_transports(*every)
                for transport in every:
                    transport.close()
                if self.tracer is not None:
                    self.tracer.close()


class _CurrentContext(threading.local):
    """Holder of the current context: one per process, or per thread if ranks are threads."""

    process: ClassVar[Context | None] = None
    own: Context | None = None  # of the thread, where it has one


_current = _CurrentContext()


def activate(context: Context | None) -> None:
    """Make a context the current one of the process."""
    _CurrentContext.process = context


@contextmanager
def use(context: Context) -> Iterator[None]:
    """Make a context this thread's current context within a ``with`` block."""
    before, _current.own = _current.own, context
    try:
        yield
    finally:
        _current.own = before


def current() -> Context:
    """Return the context of this rank; a process forked from it may read it too.

    Raises:
        NotInitializedError: There is none; the message says what to call.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.current().rank)
        [0, 1]
    """
    context = _current.own or _current.process
    if context is None:
        raise NotInitializedError(
            "asyncddp is not initialised: call asyncddp.init() first, or run inside "
            "asyncddp.local_world(n).run(...)"
        )
    return context


def refuse_forked(what: str) -> None:
    """Raise ``NotInitializedError`` if this process was forked from a rank."""
    context = _current.own or _current.process
    if context is not None and context.engine.forked:
        context.engine.ensure_open(what)


def in_local_world() -> bool:
    """Return True if this thread is a rank of a local world."""
    return _current.own is not None


def is_initialized() -> bool:
    """Return True if this process is a rank, and not a fork of one: operations may be called.

    Example:
        >>> import asyncddp as bf
        >>> bf.is_initialized()
        False
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.is_initialized)
        [True, True]
    """
    context = _current.own or _current.process
    return context is not None and not context.engine.forked
