"""MPI's communicators of a world, which the next ``init()`` of the same processes uses again.

A communicator is never freed while a message on it may be under way: MPI would give its number to
the next one, which would then receive that message. Nor are new ones made for each world, since
each holds some KiB for good and keeps the memory between them from being used again. So the ranks
agree at the next ``init()`` that all that was sent has been received, and go on with the old ones.
"""

from __future__ import annotations

import itertools
import time
from typing import cast

import numpy as np
import numpy.typing as npt

from asyncddp.transport.mpi_library import MPI
from asyncddp.transport.mpi_requests import translated

__all__ = ["CommunicatorPair", "pair_of_world"]

_PATIENCE = 5.0  # seconds for messages that were sent before to arrive
_NAP = 0.00005  # seconds
_idle: list[CommunicatorPair] = []
"""Those of the worlds that have ended here."""
_numbers = itertools.count(1)
Counts = npt.NDArray[np.int64]


class CommunicatorPair:
    """Two communicators between the same ranks, with counts of what went through them.

    Args:
        comm: The communicator for messages and collectives; a clone of it carries bulk data.
        number: How many were made before between all processes of the job, and this one.

    Attributes:
        sent, received: Messages to and from each rank, through ``comm`` and through ``bulk``.
        collectives: How many were started.
        under_way: How many of them have not ended.
        spoilt: Whether a transfer was given up, so that the counts no longer say what is under way.
        used: Whether a transport uses them now.
    """

    def __init__(self, comm: MPI.Intracomm, number: int = 1) -> None:
        self.comm, self.number = comm, number
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.bulk = comm.Dup()
        self.bulk.Set_errhandler(MPI.ERRORS_RETURN)
        self.sent, self.received = ([[0] * comm.size for _ in range(2)] for _ in range(2))
        self.collectives = self.under_way = 0
        self.spoilt, self.used = False, True
        self._parts: dict[tuple[int, ...], CommunicatorPair] = {}

    @translated
    def split(self, color: int, key: int) -> CommunicatorPair:
        """Those of the ranks with the same colour, in the order of their keys; collective."""
        every = np.empty(2 * self.comm.size, dtype=np.int64)
        self.comm.Allgather(np.array([color, key]), every)
        wanted = tuple(every.tolist())
        mates = np.flatnonzero(every[::2] == color)
        if not _ready(self._parts.get(wanted), self.comm, mates):
            part = cast("MPI.Intracomm", self.comm.Split(color, key))
            self._parts[wanted] = CommunicatorPair(part)
        self._parts[wanted].used = True
        return self._parts[wanted]

    def leave(self, *, world: bool) -> None:
        """No transport uses them any more; the next world may."""
        self.used = False
        if world:
            _idle.append(self)

    def settle(self) -> bool:
        """Receive what was sent before and nobody wants; whether nothing is under way then."""
        counts = np.ascontiguousarray(np.array(self.sent).T)
        expected = np.empty_like(counts)
        self.comm.Alltoall(counts, expected)
        missing, deadline = expected - np.array(self.received).T, time.monotonic() + _PATIENCE
        while (missing > 0).any() and time.monotonic() < deadline:
            came = [self._receive(which, missing) for which in range(2)]
            time.sleep(0.0 if any(came) else _NAP)
        return not missing.any()

    def _receive(self, which: int, missing: Counts) -> bool:
        """Take a message off ``comm`` or ``bulk``, if there is one."""
        status = MPI.Status()
        comm = self.bulk if which else self.comm
        found = comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if found is None:
            return False
        found.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        missing[status.Get_source(), which] -= 1
        self.received[which][status.Get_source()] += 1
        return True


@translated
def pair_of_world() -> CommunicatorPair:
    """The pair of the last world, if nothing is under way on it, or a new one; collective."""
    world = MPI.COMM_WORLD
    last = max(_idle, key=lambda pair: pair.number, default=None)
    _idle.clear()
    if not _ready(last, world, np.arange(world.size)) or last is None:
        last = CommunicatorPair(world.Dup(), next(_numbers))
    last.used = True
    return last


def _ready(pair: CommunicatorPair | None, over: MPI.Intracomm, mates: Counts) -> bool:
    """Whether a pair can be used again on all ranks of a communicator; collective among them.

    Args:
        pair: It, or None where there is none.
        over: Between all who decide together.
        mates: Those of them whom the pair connects.
    """
    mine = np.zeros(3, dtype=np.int64)
    if pair is not None:
        busy = pair.used or pair.spoilt or pair.under_way > 0
        mine[:] = pair.number, pair.collectives, not busy
    every = np.empty((over.size, 3), dtype=np.int64)
    over.Allgather(mine, every)
    numbers, collectives, usable = every.T
    alike = len({*numbers.tolist()}) == 1 and len({*collectives[mates].tolist()}) == 1
    if not _all(over, mine=alike and bool(usable.all())) or pair is None:
        return False
    return _all(over, mine=pair.settle())


def _all(over: MPI.Intracomm, *, mine: bool) -> bool:
    """Whether something holds on all ranks; collective."""
    found = np.empty(1, dtype=np.int64)
    over.Allreduce(np.array([int(mine)]), found, MPI.MIN)
    return bool(found[0])
