"""``windows``: the time of one-sided put and update, beside an average that waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp import topology
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.machine_info import oversubscribed
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import LIMIT

__all__ = ["tables"]

_KB, _MB = 1024, 1024 * 1024
_SIZES = tuple(4 * 4**power for power in range(13))  # 4 B … 64 MB
_QUICK = (4 * _KB, 4 * _MB)
_OURS, _PUT, _UPDATE = "win_put + win_update", "win_put", "win_update"
_AVERAGE, _IN_PLACE = "neighbor_allreduce", "neighbor_allreduce_ (in place)"
_RMA = "MPI.Win: Put, Flush + lerp"
_AIMS = (
    Target(_OURS, 1.2, _AVERAGE, sizes=(_MB, 64 * _MB)),
    Target(_OURS, sizes=(4, 4 * _KB), seconds=25e-6),
)


@dataclass
class _MpiWindow:
    """MPI window of one table, with a buffer for each in-neighbour, or why there is none."""

    world: RankGroup
    schedule: Schedule
    largest: int
    window: MPI.Win | None = None
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    problem: str = ""

    def open(self) -> None:
        """Make it; collective."""
        sources = self.schedule.neighbors(self.world.rank, 0).src_weights
        whole = torch.zeros(max(1, len(sources)) * self.largest // 4)
        try:
            self.window = MPI.Win.Create(whole.numpy(), 1, comm=self.world.comm)
            self.window.Lock_all()
        except MPI.Exception as error:
            self.problem = f"MPI gives no window: {error}"
            return
        parts = torch.split(whole, self.largest // 4)
        self.buffers = dict(zip(sorted(sources), parts, strict=False))

    def close(self) -> None:
        """Free it; collective."""
        if self.window is not None:
            self.window.Unlock_all()
            self.window.Free()
            self.window = None

    def offset(self, target: int) -> int:
        """Return the offset in bytes of this rank's buffer at a neighbour."""
        sources = sorted(self.schedule.neighbors(target, 0).src_weights)
        return sources.index(self.world.rank) * self.largest

    def exchange(self, nbytes: int) -> Call:
        """Put into the neighbours' memory, flush, and mix with what lies in one's own.

        Raises:
            Unavailable: There is no window.
        """
        window = self.window
        if window is None:
            raise RivalUnavailableError(self.problem)
        near = self.schedule.neighbors(self.world.rank, 0)
        own = baselines.tensor(nbytes, self.world.rank)
        others = {source: self.buffers[source][: nbytes // 4] for source in near.src_weights}
        places = [(peer, (self.offset(peer), nbytes, MPI.BYTE)) for peer in near.dst_ranks]

        def call(number: int) -> torch.Tensor:
            for peer, place in places:
                window.Put([own.numpy(), MPI.FLOAT], peer, place)
            for peer, _ in places:
                window.Flush(peer)
            if number == 0:
                self.world.comm.Barrier()
                window.Sync()
            if len(others) == 1:
                ((source, other),) = others.items()
                return torch.lerp(own, other, near.src_weights[source], out=own)
            own.mul_(near.self_weight)
            for source, other in others.items():
                own.add_(other, alpha=near.src_weights[source])
            return own

        return call


def _window_rival(world: RankGroup, name: str, *, puts: bool, updates: bool) -> Rival:
    """A window over a tensor of its own: published, mixed in place, or both."""

    def prepare(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)
        if name in bf.get_current_created_window_names():
            bf.win_free(name)
        bf.win_create(own, name)

        def call(number: int) -> torch.Tensor:
            if puts or number == 0:
                bf.win_put(own, name)
            if number == 0:
                world.comm.Barrier()
            return bf.win_update(name) if updates or number == 0 else own

        return call

    return Rival(name, prepare)


def windows_table(
    world: RankGroup, schedule: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """Put and update over a graph, and those who average with the same neighbours.

    Whoever reads a window mixes what has come so far; only the first call, whose result is
    checked, waits between the two.
    """
    memory = _MpiWindow(world, schedule, max(sizes))

    def begin() -> None:
        bf.set_topology(schedule)
        memory.open()

    def end() -> None:
        bf.win_free()
        memory.close()

    def average(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(own, name="beside windows")

    def in_place(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce_(own, name="beside windows, in place")

    rivals = (
        _window_rival(world, _OURS, puts=True, updates=True),
        Rival(_AVERAGE, average),
        Rival(_IN_PLACE, in_place),
        Rival(_RMA, memory.exchange),
        _window_rival(world, _PUT, puts=True, updates=False),
        _window_rival(world, _UPDATE, puts=False, updates=True),
        Rival(LIMIT, partial(baselines.local_mix, world, schedule)),
    )
    return TimingTable(
        "windows",
        "win_put and win_update, exponential-2 graph",
        sizes,
        rivals,
        expected=partial(baselines.average, schedule, world.rank),
        begin=begin,
        end=end,
        targets=targets,
        compare=(_OURS, _AVERAGE),
        note="Ranks of windows do not wait for each other; those of an average do.",
    )


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    schedule = topology.as_schedule(topology.exponential_two(world.size))
    targets = () if oversubscribed(world) else _AIMS
    return [windows_table(world, schedule, _QUICK if quick else _SIZES, targets)]
