"""Benchmark table of ``allreduce`` beside MPI and gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import IN_PLACE, OURS, OUT

__all__ = ["GLOO_SUM", "MPI_SUM", "NEIGHBOR", "allreduce_table"]

MPI_SUM, GLOO_SUM = "MPI: Allreduce + div", "gloo: all_reduce + div in place"
NEIGHBOR = "neighbor_allreduce: one peer"


def allreduce_table(
    world: RankGroup, one_peer: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``allreduce``, those who sum and divide by hand, and what one neighbour costs instead."""

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.allreduce(own)

    def into_another(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        out = torch.empty_like(own)
        return lambda number: bf.allreduce(own, out=out)

    def in_place(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)
        return lambda number: bf.allreduce_(own)

    def mpi(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            world.comm.Allreduce(own.numpy(), out.numpy(), MPI.SUM)
            return out.div_(world.size)

        return call

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise RivalUnavailableError(world.gloo)
        own = baselines.tensor(nbytes, world.rank)

        def call(number: int) -> torch.Tensor:
            torch.distributed.all_reduce(own)
            return own.div_(world.size)

        return call

    def neighbor(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(own, round=number)

    return TimingTable(
        "allreduce",
        "allreduce, average",
        sizes,
        (
            Rival(OURS, ours),
            Rival(OUT, into_another),
            Rival(IN_PLACE, in_place),
            Rival(MPI_SUM, mpi),
            Rival(GLOO_SUM, gloo),
            Rival(NEIGHBOR, neighbor, checked=False),  # another average where ranks are many
        ),
        expected=lambda nbytes: baselines.tensor(nbytes, 0) * ((world.size + 1) / 2),
        begin=lambda: bf.set_topology(one_peer),
        targets=targets,
        compare=(OURS, MPI_SUM),
    )
