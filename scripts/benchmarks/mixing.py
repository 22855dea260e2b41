"""Averages with neighbours: asyncddp beside mpi4py, gloo and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import Call, Rival, Table, World
from topology import Schedule

__all__ = ["mixing_table"]


def mixing_table(
    world: World, key: str, title: str, schedule: Schedule, sizes: Sequence[int]
) -> Table:
    """``neighbor_allreduce`` over a schedule, and those who do the same by hand."""

    def ours(nbytes: int) -> Call:
        own = raw.tensor(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(own, round=number)

    def in_place(nbytes: int) -> Call:
        own = raw.tensor(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce_(own, round=number)

    def expected(nbytes: int) -> torch.Tensor:
        near = schedule.neighbors(world.rank, 0)
        total = near.self_weight * raw.tensor(nbytes, world.rank)
        for peer, weight in near.src_weights.items():
            total += weight * raw.tensor(nbytes, peer)
        return total

    def limit(nbytes: int) -> Call:
        return raw.local_mix(world, schedule, nbytes)

    one_peer = all(
        len(schedule.neighbors(rank, k).src_weights) == 1
        for rank in range(world.size)
        for k in range(schedule.period or 1)
    )
    by_mpi = "mpi4py Sendrecv + lerp" if one_peer else "mpi4py Isend, Irecv + add"
    by_gloo = "gloo batch_isend_irecv + " + ("lerp" if one_peer else "add")
    return Table(
        key,
        title,
        sizes,
        (
            Rival("asyncddp", ours),
            Rival(by_mpi, partial(raw.mpi_exchange, world, schedule)),
            Rival("asyncddp in place", in_place),
            Rival(by_gloo, partial(raw.gloo_exchange, world, schedule)),
            Rival("limit: local " + ("lerp" if one_peer else "add"), limit),
        ),
        expected=expected,
        begin=lambda: bf.set_topology(schedule),
    )
