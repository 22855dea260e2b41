"""Tables of small averages of more ranks than cores, by asyncddp and by mpi4py in three ways."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from mpi4py import MPI

from asyncddp import topology
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, TimingTable
from benchmarks.verbs.allreduce_table import MPI_SUM, allreduce_table
from benchmarks.verbs.neighbor_allreduce_table import MPI4PY, OURS, mixing_table

__all__ = ["oversubscribed_tables"]

_NBYTES = 4096
_COMPARED = (OURS, MPI4PY, MPI_SUM)


def oversubscribed_tables(world: RankGroup) -> list[TimingTable]:
    """Both averages, by asyncddp and by mpi4py: in memory that is there, and in a function."""
    one_peer = topology.as_schedule(topology.one_peer_exponential(world.size))
    averages = mixing_table(world, "one-peer average", "", one_peer, (_NBYTES,))
    sums = allreduce_table(world, one_peer, (_NBYTES,))
    others = (
        (partial(_average_arrays, world, one_peer), partial(_average_function, world, one_peer)),
        (partial(_sum_arrays, world), partial(_sum_function, world)),
    )
    return [
        replace(
            table,
            rivals=[
                *(rival for rival in table.rivals if rival.name in _COMPARED),
                Rival("mpi4py on numpy's arrays", arrays),
                Rival("mpi4py in a function of tensors", function),
            ],
        )
        for table, (arrays, function) in zip((averages, sums), others, strict=True)
    ]


def _sum_arrays(world: RankGroup, nbytes: int) -> Call:
    """An allreduce without torch, in memory that is there."""
    own = baselines.own(nbytes, world.rank).numpy()
    out = np.empty_like(own)
    result = torch.from_numpy(out)

    def call(number: int) -> torch.Tensor:
        world.comm.Allreduce(own, out, MPI.SUM)
        np.divide(out, world.size, out)
        return result

    return call


def _peers(world: RankGroup, schedule: Schedule) -> list[tuple[int, int, float]]:
    """For each round whom this rank sends to, whom it receives from, and with which weight."""
    rounds = [schedule.neighbors(world.rank, k) for k in range(schedule.period or 1)]
    return [(near.dst_ranks[0], *next(iter(near.src_weights.items()))) for near in rounds]


def _average_arrays(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """An average with a neighbour without torch, in memory that is there."""
    own = baselines.own(nbytes, world.rank).numpy()
    out = np.empty_like(own)
    result = torch.from_numpy(out)
    peers = _peers(world, schedule)

    def call(number: int) -> torch.Tensor:
        target, source, weight = peers[number % len(peers)]
        world.comm.Sendrecv(own, target, recvbuf=out, source=source)
        np.subtract(out, own, out)
        np.multiply(out, weight, out)
        np.add(out, own, out)
        return result

    return call


def _check(tensor: torch.Tensor) -> None:
    """Ask whether a tensor's memory can be sent as it is, as any library must."""
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor on the host, without gradient")


def _sum_function(world: RankGroup, nbytes: int) -> Call:
    """The least that an allreduce does that takes a tensor and returns another."""
    own = baselines.own(nbytes, world.rank)

    def call(number: int) -> torch.Tensor:
        _check(own)
        out = torch.empty_like(own)
        world.comm.Allreduce(own.numpy(), out.numpy(), MPI.SUM)
        return out.div_(world.size)

    return call


def _average_function(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """The least that an average with a neighbour does that takes a tensor and returns another."""
    own = baselines.own(nbytes, world.rank)

    peers = _peers(world, schedule)

    def call(number: int) -> torch.Tensor:
        _check(own)
        out = torch.empty_like(own)
        target, source, weight = peers[number % len(peers)]
        world.comm.Sendrecv(own.numpy(), target, recvbuf=out.numpy(), source=source)
        return torch.lerp(own, out, weight, out=out)

    return call
