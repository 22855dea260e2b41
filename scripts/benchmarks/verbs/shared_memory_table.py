"""Benchmark table of averages of buffers in memory that the machine's ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import asyncddp as bf
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import IN_PLACE, LIMIT, OUT

__all__ = ["shared_table"]


def _shared(like: torch.Tensor) -> torch.Tensor:
    """A copy in the library's shared memory.

    Raises:
        Unavailable: There is none here.
    """
    transport = bf.current().transport
    if transport.shared_memory_group is None:
        raise RivalUnavailableError(f"the transport {transport.name} shares no memory")
    return bf.empty_shared(like.shape, dtype=like.dtype).copy_(like)


def shared_table(
    world: RankGroup, schedule: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``neighbor_allreduce`` over a one-peer schedule, of shared buffers, and the limit."""

    def in_place(nbytes: int) -> Call:
        own = _shared(baselines.own(nbytes, world.rank))
        return lambda number: bf.neighbor_allreduce_(own, round=number)

    def into_another(nbytes: int) -> Call:
        own = _shared(baselines.own(nbytes, world.rank))
        out = _shared(own)
        return lambda number: bf.neighbor_allreduce(own, round=number, out=out)

    return TimingTable(
        "shared",
        "neighbor_allreduce, one peer per call, buffers in the library's shared memory",
        sizes,
        (
            Rival(IN_PLACE, in_place),
            Rival(OUT, into_another),
            Rival(LIMIT, partial(baselines.local_mix, world, schedule)),
        ),
        expected=partial(baselines.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        targets=targets,
        compare=(IN_PLACE, LIMIT),
    )
