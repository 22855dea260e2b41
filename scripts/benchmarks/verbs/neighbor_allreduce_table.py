"""Benchmark table of ``neighbor_allreduce`` beside mpi4py, gloo and the memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import asyncddp as bf
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, Target, TimingTable

__all__ = ["IN_PLACE", "LIMIT", "MPI4PY", "OURS", "OUT", "mixing_table"]

OURS, OUT, IN_PLACE = "asyncddp", "asyncddp, out=", "asyncddp in place"
MPI4PY, LIMIT = "mpi4py: Sendrecv + lerp", "limit: local lerp"


def mixing_table(
    world: RankGroup,
    key: str,
    title: str,
    schedule: Schedule,
    sizes: Sequence[int],
    targets: Sequence[Target] = (),
) -> TimingTable:
    """``neighbor_allreduce`` over a schedule, and those who do the same by hand."""

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(own, round=number)

    def into_another(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        out = torch.empty_like(own)
        return lambda number: bf.neighbor_allreduce(own, round=number, out=out)

    def in_place(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce_(own, round=number)

    one_peer = all(
        len(schedule.neighbors(rank, k).src_weights) == 1
        for rank in range(world.size)
        for k in range(schedule.period or 1)
    )
    by_mpi = MPI4PY if one_peer else "mpi4py: Isend, Irecv + add"
    rivals = (
        Rival(OURS, ours),
        Rival(OUT, into_another),
        Rival(IN_PLACE, in_place),
        Rival(by_mpi, partial(baselines.mpi_exchange, world, schedule)),
        Rival(
            "gloo: batch_isend_irecv + " + ("lerp" if one_peer else "add"),
            partial(baselines.gloo_exchange, world, schedule),
        ),
        Rival(
            LIMIT if one_peer else "limit: local add", partial(baselines.local_mix, world, schedule)
        ),
    )
    return TimingTable(
        key,
        title,
        sizes,
        rivals,
        expected=partial(baselines.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        targets=targets,
        compare=(OURS, by_mpi),
    )
