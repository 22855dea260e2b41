"""Pairs of MPI communicators, one for control messages and one for tensors, for reuse.

A communicator is never freed while a message on it may be in flight: MPI would give its context id
to the next one, which would then receive that message. New ones for each ``init()`` would take some
KiB each for good. So the ranks agree at the next ``init()`` that every message sent has been
received, and reuse the old communicators.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from asyncddp.serialization import pack, unpack
from asyncddp.transport.base import Request
from asyncddp.transport.mpi.runtime import MPI, translate_mpi_errors

_DRAIN_TIMEOUT = 5.0  # seconds for messages in flight to arrive
_SLEEP_SECONDS = 0.00005  # seconds
_LENGTH, _SHORT = 8, 120  # bytes of a record's length, and of one that goes along with it
_idle_pairs: list[CommunicatorPair] = []
"""Pairs released by earlier shutdowns of this process."""
_serials = itertools.count(1)
Counts = npt.NDArray[np.int64]
T = TypeVar("T")


class CommunicatorPair:
    """Pair of MPI communicators of the same ranks: one for control messages, one for tensors.

    ``comm`` is for control messages and collectives, ``bulk`` for tensors. ``sent`` and
    ``received`` count messages to and from each rank, through ``comm`` and through ``bulk``; they
    are invalid once a request was abandoned.
    """

    def __init__(self, comm: MPI.Intracomm, serial: int = 1) -> None:
        self.comm, self.serial = comm, serial
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.bulk = comm.Dup()
        self.bulk.Set_errhandler(MPI.ERRORS_RETURN)
        self.sent, self.received = ([[0] * comm.size for _ in range(2)] for _ in range(2))
        self.collectives = self.pending_collectives = 0
        self.abandoned: list[Request] = []  # MPI may still use their buffers
        self.counts_invalid, self.in_use = False, True
        self._split_pairs: dict[tuple[tuple[int, int], ...], CommunicatorPair] = {}

    @cached_property
    def machine(self) -> MPI.Intracomm:
        """Communicator between the ranks of this machine; its first use is collective."""
        part = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.comm.rank)
        return cast("MPI.Intracomm", part)

    @translate_mpi_errors
    def split(self, color: int, key: int) -> CommunicatorPair:
        """Return the pair between the ranks of equal color, ordered by key; collective."""
        wanted = tuple(allgather_records(self.comm, (color, key), tuple[int, int]))
        parts: dict[int, list[int]] = {}
        for rank, (other, _) in enumerate(wanted):
            parts.setdefault(other, []).append(rank)
        if not _reusable(self._split_pairs.get(wanted), self.comm, parts.values()):
            part = cast("MPI.Intracomm", self.comm.Split(color, key))
            self._split_pairs[wanted] = CommunicatorPair(part)
        self._split_pairs[wanted].in_use = True
        return self._split_pairs[wanted]

    @translate_mpi_errors
    def split_members(self, ranks: Sequence[int], tag: int) -> CommunicatorPair:
        """Return a new pair between these ranks, in this order; collective over only these."""
        group = self.comm.Get_group().Incl(list(ranks))
        try:
            return CommunicatorPair(self.comm.Create_group(group, tag))
        finally:
            group.Free()

    def release(self, *, world: bool) -> None:
        """Release the pair for reuse by the next ``init()``."""
        self.in_use = False
        if world:
            _idle_pairs.append(self)

    def drain(self) -> bool:
        """Receive and drop all messages in flight; return True if none remains; collective."""
        counts = np.ascontiguousarray(np.array(self.sent).T)
        expected = np.empty_like(counts)
        self.comm.Alltoall(counts, expected)
        missing, deadline = expected - np.array(self.received).T, time.monotonic() + _DRAIN_TIMEOUT
        while (missing > 0).any() and time.monotonic() < deadline:
            came = [self._receive_one(which, missing) for which in range(2)]
            time.sleep(0.0 if any(came) else _SLEEP_SECONDS)
        return not missing.any()

    def _receive_one(self, which: int, missing: Counts) -> bool:
        """Receive and drop one message from ``comm`` or ``bulk``, if there is one."""
        status = MPI.Status()
        comm = self.bulk if which else self.comm
        found = comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if found is None:
            return False
        found.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        missing[status.Get_source(), which] -= 1
        self.received[which][status.Get_source()] += 1
        return True


@translate_mpi_errors
def acquire_world_pair() -> CommunicatorPair:
    """Return the pair of the last ``init()`` if reusable, or a new one; collective."""
    world = MPI.COMM_WORLD
    last = max(_idle_pairs, key=lambda pair: pair.serial, default=None)
    _idle_pairs.clear()
    if not _reusable(last, world, [range(world.size)]) or last is None:
        last = CommunicatorPair(world.Dup(), next(_serials))
    last.in_use = True
    return last


def _reusable(
    pair: CommunicatorPair | None, comm: MPI.Intracomm, parts: Iterable[Iterable[int]]
) -> bool:
    """Return whether all ranks of ``comm`` can reuse their common pair; collective."""
    mine = 0, 0, False
    if pair is not None:
        busy = pair.in_use or pair.counts_invalid or pair.pending_collectives > 0
        mine = pair.serial, pair.collectives, not busy
    every = allgather_records(comm, mine, tuple[int, int, bool])
    alike = len({serial for serial, _, _ in every}) == 1
    alike = alike and all(len({every[rank][1] for rank in part}) == 1 for part in parts)
    if not alike or not all(free for _, _, free in every) or pair is None:
        return False
    return all(allgather_records(comm, pair.drain(), bool))


def allgather_records(comm: MPI.Comm, mine: T, kind: type[T]) -> list[T]:
    """Gather one record of a given type from every rank, in rank order; collective.

    Short records go along with their lengths, in one call of MPI in place of two.
    """
    data = np.frombuffer(pack(mine), dtype=np.uint8)
    start = np.zeros(_LENGTH + _SHORT, dtype=np.uint8)
    start[:_LENGTH] = np.array([data.size], dtype=np.int64).view(np.uint8)
    start[_LENGTH : _LENGTH + data.size] = data[:_SHORT]
    starts = np.empty((comm.size, start.size), dtype=np.uint8)
    comm.Allgather(start, starts)
    sizes = starts[:, :_LENGTH].copy().view(np.int64).ravel()
    if sizes.max() <= _SHORT:
        parts = [row[_LENGTH : _LENGTH + size] for row, size in zip(starts, sizes, strict=True)]
    else:
        whole = np.empty(sizes.sum(), dtype=np.uint8)
        comm.Allgatherv(data, [whole, sizes, MPI.BYTE])
        parts = np.split(whole, np.cumsum(sizes)[:-1])
    return [
        unpack(part.tobytes(), kind, f"what rank {peer} says of itself")
        for peer, part in enumerate(parts)
    ]
