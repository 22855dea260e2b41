"""``windows``: the time of one-sided put and update, beside an average that waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp import topology
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.baselines import CHANGE, rival
from benchmarks.machine_info import oversubscribed
from benchmarks.mixing import LIMIT
from benchmarks.tables import (
    KB,
    MB,
    Call,
    RankGroup,
    Rival,
    RivalUnavailableError,
    Target,
    TimingTable,
)

_SIZES = tuple(4 * 4**power for power in range(13))  # 4 B … 64 MB
_QUICK = (4 * KB, 4 * MB)
_OURS, _PUT, _UPDATE = "win_put + win_update", "win_put", "win_update"
_AVERAGE, _IN_PLACE = "neighbor_allreduce", "neighbor_allreduce_ (in place)"
_RMA = "MPI.Win: Put, Flush + lerp"
_AIMS = (
    Target(_OURS, 1.2, _AVERAGE, sizes=(MB, 64 * MB)),
    Target(_OURS, sizes=(4, 4 * KB), seconds=25e-6),
)


class _MpiWindow:
    """MPI window of one table, with a buffer for each in-neighbour, or why there is none."""

    def __init__(self, world: RankGroup, schedule: Schedule, largest: int) -> None:
        self._world, self._near = world, schedule.neighbors(world.rank, 0)
        self._largest = largest
        self._window: MPI.Win | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        self._problem = ""
        # in bytes, of this rank's buffer at each neighbour
        self._offsets = {
            peer: sorted(schedule.neighbors(peer, 0).src_weights).index(world.rank) * largest
            for peer in self._near.dst_ranks
        }

    def open(self) -> None:
        """Make it; collective."""
        sources = sorted(self._near.src_weights)
        whole = torch.zeros(max(1, len(sources)) * self._largest // 4)
        try:
            self._window = MPI.Win.Create(whole.numpy(), 1, comm=self._world.comm)
            self._window.Lock_all()
        except MPI.Exception as error:
            self._problem = f"MPI gives no window: {error}"
            return
        self._buffers = dict(zip(sources, torch.split(whole, self._largest // 4), strict=False))

    def close(self) -> None:
        """Free it; collective."""
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = None

    def exchange(self, nbytes: int) -> Call:
        """Put into the neighbours' memory, flush, and mix with what lies in one's own.

        Raises:
            Unavailable: There is no window.
        """
        window, near = self._window, self._near
        if window is None:
            raise RivalUnavailableError(self._problem)
        own = baselines.tensor(nbytes, self._world.rank)
        others = [self._buffers[source][: nbytes // 4] for source in near.src_weights]
        places = [(peer, (at, nbytes, MPI.BYTE)) for peer, at in self._offsets.items()]

        def call(number: int) -> torch.Tensor:
            for peer, place in places:
                window.Put([own.numpy(), MPI.FLOAT], peer, place)
            for peer, _ in places:
                window.Flush(peer)
            if number == 0:
                self._world.comm.Barrier()
                window.Sync()
            return baselines.combine(near, own, others, own)

        return call


def _window(world: RankGroup, name: str, *, puts: bool = True, updates: bool = True) -> Rival:
    """A window over a tensor of its own: published, mixed in place, or both."""

    def call(own: torch.Tensor, number: int) -> torch.Tensor:
        if puts or number == 0:
            bf.win_put(own, name)
        if number == 0:
            world.comm.Barrier()
        return bf.win_update(name) if updates or number == 0 else own

    def prepare(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)
        if name in bf.get_current_created_window_names():
            bf.win_free(name)
        bf.win_create(own, name)
        return partial(call, own)

    return Rival(name, prepare)


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """Put and update over a graph, and those who average with the same neighbours.

    Whoever reads a window mixes what has come so far; only the first call, whose result is
    checked, waits between the two.
    """
    schedule = topology.as_schedule(topology.exponential_two(world.size))
    sizes = _QUICK if quick else _SIZES
    memory = _MpiWindow(world, schedule, max(sizes))

    def begin() -> None:
        bf.set_topology(schedule)
        memory.open()

    def end() -> None:
        bf.win_free()
        memory.close()

    def average(own: torch.Tensor, number: int) -> torch.Tensor:
        return bf.neighbor_allreduce(own, name="beside windows")

    def in_place(own: torch.Tensor, number: int) -> torch.Tensor:
        return bf.neighbor_allreduce_(own, name="beside windows, in place")

    rivals = (
        _window(world, _OURS),
        rival(world, _AVERAGE, average),
        rival(world, _IN_PLACE, in_place, CHANGE),
        Rival(_RMA, memory.exchange),
        _window(world, _PUT, updates=False),
        _window(world, _UPDATE, puts=False),
        Rival(LIMIT, partial(baselines.local_mix, world, schedule)),
    )
    return [
        TimingTable(
            "windows",
            "win_put and win_update, exponential-2 graph",
            sizes,
            rivals,
            expected=partial(baselines.average, schedule, world.rank),
            begin=begin,
            end=end,
            targets=() if oversubscribed(world) else _AIMS,
            compare=(_OURS, _AVERAGE),
            note="Ranks of windows do not wait for each other; those of an average do.",
        )
    ]
