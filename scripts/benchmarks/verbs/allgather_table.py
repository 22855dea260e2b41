"""Benchmark table of ``allgather`` beside MPI and gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import asyncddp as bf
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import OURS

__all__ = ["MPI_ALLGATHER", "allgather_table"]

MPI_ALLGATHER = "MPI: Allgather"


def allgather_table(
    world: RankGroup, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``allgather``, and the same with memory for the result laid out before."""

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.allgather(own)

    def mpi(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        out = own.new_empty(world.size * own.numel())

        def call(number: int) -> torch.Tensor:
            world.comm.Allgather(own.numpy(), out.numpy())
            return out

        return call

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise RivalUnavailableError(world.gloo)
        own = baselines.own(nbytes, world.rank)
        out = own.new_empty(world.size * own.numel())
        # The newer of its two names warns of nothing.
        older = torch.distributed.all_gather_into_tensor
        gather = getattr(torch.distributed, "all_gather_single", older)

        def call(number: int) -> torch.Tensor:
            gather(out, own)
            return out

        return call

    return TimingTable(
        "allgather",
        "allgather",
        sizes,
        (Rival(OURS, ours), Rival(MPI_ALLGATHER, mpi), Rival("gloo: all_gather_single", gloo)),
        size_is="tensor of a rank",
        expected=lambda nbytes: torch.cat([baselines.tensor(nbytes, r) for r in range(world.size)]),
        targets=targets,
    )
