"""Averages of buffers that live in memory which the machine's ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import Aim, Call, Rival, Table, Unavailable, World
from benchmarks.mixing import IN_PLACE, LIMIT, OUT
from topology import Schedule

__all__ = ["shared_table"]


def _shared(like: torch.Tensor) -> torch.Tensor:
    """A copy in the library's shared memory.

    Raises:
        Unavailable: There is none here.
    """
    wire = bf.current().transport
    if wire.neighborhood is None:
        raise Unavailable(f"the wire {wire.name} shares no memory")
    return bf.empty_shared(like.shape, dtype=like.dtype).copy_(like)


def shared_table(
    world: World, schedule: Schedule, sizes: Sequence[int], aims: Sequence[Aim] = ()
) -> Table:
    """``neighbor_allreduce`` over a one-peer schedule, of shared buffers, and the limit."""

    def in_place(nbytes: int) -> Call:
        own = _shared(raw.own(nbytes, world.rank))
        return lambda number: bf.neighbor_allreduce_(own, round=number)

    def into_another(nbytes: int) -> Call:
        own = _shared(raw.own(nbytes, world.rank))
        out = _shared(own)
        return lambda number: bf.neighbor_allreduce(own, round=number, out=out)

    return Table(
        "shared",
        "neighbor_allreduce, one peer per call, buffers in the library's shared memory",
        sizes,
        (
            Rival(IN_PLACE, in_place),
            Rival(OUT, into_another),
            Rival(LIMIT, partial(raw.local_mix, world, schedule)),
        ),
        expected=partial(raw.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        aims=aims,
        compare=(IN_PLACE, LIMIT),
    )
