"""One rank's world, and which one is current."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from asyncddp.config import Config
from asyncddp.context.clock import Clock, measure
from asyncddp.context.topologies import Topologies
from asyncddp.engine import Engine
from asyncddp.errors import NotInitializedError
from asyncddp.memory.allocate import values
from asyncddp.timeline.starting import recorder_for
from asyncddp.transport import Transport
from asyncddp.transport.device_agreement import let_go, settle

__all__ = ["Context", "activate", "current", "in_local_world", "is_initialized", "use"]


@dataclass(frozen=True)
class Machines:
    """Which ranks share a machine.

    Attributes:
        members: World ranks of each machine, ascending; machines in order of their first rank.
        recording: Ranks that have a timeline, ascending.
    """

    members: tuple[tuple[int, ...], ...]
    recording: tuple[int, ...] = ()

    @classmethod
    def of(cls, transport: Transport, config: Config) -> Machines:
        """Find out; collective."""
        per, rank = config.ranks_per_machine, transport.rank
        mine = rank // per if per is not None else transport.machine()
        facts = values([mine, int(config.timeline is not None)], torch.int64)
        found = transport.allgather(facts, [2] * transport.size, config.timeout).tolist()
        every, recording = found[::2], found[1::2]
        order = list(dict.fromkeys(every))
        return cls(
            tuple(tuple(r for r, m in enumerate(every) if m == one) for one in order),
            tuple(r for r, records in enumerate(recording) if records),
        )

    @property
    def homogeneous(self) -> bool:
        """Whether all have equally many ranks, numbered one machine after the other."""
        flat = [rank for machine in self.members for rank in machine]
        return len({len(m) for m in self.members}) == 1 and flat == sorted(flat)


class Context:
    """Everything that a rank's verbs need; :func:`asyncddp.current` gives it.

    Args:
        transport: The wire between all ranks.
        config: Its settings.

    Attributes:
        rank, size: This rank, and how many there are.
        local_rank, local_size: The same among the ranks of this machine.
        machine_rank, machine_size: This machine, and how many there are.
        recorder: Takes notes for the timeline, if there is one.
        device_choice: The wire for tensors on GPUs, and why not another one that was asked for.

    Raises:
        ArgumentError: The timeline cannot be written where the settings say.
        UnknownNameError: There is no wire for GPUs of the name that the settings say.
        MismatchError: Another wire for GPUs was asked for, and some ranks see GPUs, others none.
    """

    def __init__(self, transport: Transport, config: Config) -> None:
        self.transport, self.config = transport, config
        self.rank, self.size = transport.rank, transport.size
        self.recorder = recorder_for(config, self.rank, self.size)
        self.machines = Machines.of(transport, config)
        self.machine_size = len(self.machines.members)
        self.machine_rank = next(
            m for m, members in enumerate(self.machines.members) if self.rank in members
        )
        self.local_ranks = self.machines.members[self.machine_rank]
        self.local_size = len(self.local_ranks)
        self.local_rank = self.local_ranks.index(self.rank)
        self.local_transport = transport.split(self.machine_rank, self.rank)
        self.device_choice = settle(
            transport,
            config,
            machine=self.machine_rank,
            local_rank=self.local_rank,
            part=self.local_transport,
        )
        self.topologies = Topologies(self.size, self.machine_size, self.rank)
        first = measure(transport, self.machines.recording, config.timeout)
        self.engine = Engine(transport, config, self.recorder)
        self._clock = Clock(self.engine, self.recorder, first) if self.machines.recording else None
        self.attachments: dict[str, Any] = {}
        """What rooms above keep for each world, by their name."""
        self.farewells: list[Callable[[], None]] = []
        """What rooms above do before this rank leaves: wait for messages under way."""

    def close(self, reason: str) -> None:
        """Leave the world; harmless when called twice, and in a forked process."""
        if self.engine.forked:
            return
        try:
            while self.farewells:
                self.farewells.pop()()
        finally:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        try:
            if self._clock is not None:
                self._clock.stop()
            self.engine.close(reason)
        finally:
            self.attachments.clear()
            let_go(self.local_transport, self.transport)
            self.local_transport.close()
            self.transport.close()
            if self.recorder is not None:
                self.recorder.close()


class _Current:
    """The process's context, unless a thread of a local world has its own."""

    def __init__(self) -> None:
        self.process: Context | None = None
        self.thread = threading.local()

    def get(self) -> Context | None:
        """The thread's own context, or the process's; None where there is none."""
        own: Context | None = getattr(self.thread, "context", None)
        return own or self.process


_current = _Current()


def activate(context: Context | None, *, thread: bool = False) -> None:
    """Make a context the current one of the process, or of this thread only."""
    if thread:
        _current.thread.context = context
    else:
        _current.process = context


@contextmanager
def use(context: Context) -> Iterator[None]:
    """Make a context this thread's for a while: for callbacks, which run in any thread."""
    before: Context | None = getattr(_current.thread, "context", None)
    _current.thread.context = context
    try:
        yield
    finally:
        _current.thread.context = before


def current() -> Context:
    """The context of this rank; a process that was forked from it may read it as well.

    Raises:
        NotInitializedError: There is none; the message says what to call.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.current().rank)
        [0, 1]
    """
    context = _current.get()
    if context is None:
        raise NotInitializedError(
            "asyncddp is not initialised: call asyncddp.init() first, or run inside "
            "asyncddp.local_world(n).run(...)"
        )
    return context


def refuse_forked(what: str) -> None:
    """Refuse what only a process of its own can do.

    Raises:
        NotInitializedError: This process was forked from a rank.
    """
    context = _current.get()
    if context is not None and context.engine.forked:
        context.engine.insist(what)


def in_local_world() -> bool:
    """Whether this thread is a rank of a local world, whose owner starts and ends it."""
    return getattr(_current.thread, "context", None) is not None


def is_initialized() -> bool:
    """Whether verbs may be called in this process, which is a rank and no fork of one.

    Example:
        >>> import asyncddp as bf
        >>> bf.is_initialized()
        False
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.is_initialized)
        [True, True]
    """
    context = _current.get()
    return context is not None and not context.engine.forked
