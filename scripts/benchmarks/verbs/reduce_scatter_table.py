"""Benchmark table of ``reduce_scatter`` beside MPI and gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

import asyncddp as bf
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import OURS, OUT

__all__ = ["MPI_REDUCE_SCATTER", "reduce_scatter_table"]

MPI_REDUCE_SCATTER, _GLOO = "MPI: Reduce_scatter_block + div", "gloo: reduce_scatter_single + div"


def reduce_scatter_table(
    world: RankGroup, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``reduce_scatter``, and those who sum and divide by hand.

    Args:
        world: The ranks.
        sizes: Bytes of a part; those count of which all ranks' together are none above the largest.
        targets: Of the table.
    """

    def whole(nbytes: int) -> torch.Tensor:
        return baselines.own(nbytes * world.size, world.rank)

    def ours(nbytes: int) -> Call:
        own = whole(nbytes)
        return lambda number: bf.reduce_scatter(own)

    def into_another(nbytes: int) -> Call:
        own, out = whole(nbytes), torch.empty(nbytes // 4)
        return lambda number: bf.reduce_scatter(own, out=out)

    def mpi(nbytes: int) -> Call:
        own, out = whole(nbytes), torch.empty(nbytes // 4)

        def call(number: int) -> torch.Tensor:
            world.comm.Reduce_scatter_block(own.numpy(), out.numpy(), MPI.SUM)
            return out.div_(world.size)

        return call

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise RivalUnavailableError(world.gloo)
        own, out = whole(nbytes), torch.empty(nbytes // 4)
        # The newer of its two names warns of nothing.
        older = torch.distributed.reduce_scatter_tensor
        scatter = getattr(torch.distributed, "reduce_scatter_single", older)

        def call(number: int) -> torch.Tensor:
            scatter(out, own)
            return out.div_(world.size)

        return call

    def expected(nbytes: int) -> torch.Tensor:
        mean = baselines.tensor(nbytes * world.size, 0) * ((world.size + 1) / 2)
        return mean.view(world.size, -1)[world.rank]

    return TimingTable(
        "reduce_scatter",
        "reduce_scatter, average",
        [size for size in sizes if size * world.size <= max(sizes)],
        (
            Rival(OURS, ours),
            Rival(OUT, into_another),
            Rival(MPI_REDUCE_SCATTER, mpi),
            Rival(_GLOO, gloo),
        ),
        size_is="part of a rank",
        expected=expected,
        targets=targets,
        compare=(OURS, MPI_REDUCE_SCATTER),
    )
