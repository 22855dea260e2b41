"""The average over all ranks: asyncddp beside MPI and gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import Call, Rival, Table, Unavailable, World

__all__ = ["allreduce_table"]


def allreduce_table(world: World, sizes: Sequence[int]) -> Table:
    """``allreduce``, and those who sum and divide by hand."""

    def ours(nbytes: int) -> Call:
        own = raw.tensor(nbytes, world.rank)
        return lambda number: bf.allreduce(own)

    def in_place(nbytes: int) -> Call:
        own = raw.tensor(nbytes, world.rank)
        return lambda number: bf.allreduce_(own)

    def mpi(nbytes: int) -> Call:
        own = raw.tensor(nbytes, world.rank)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            world.comm.Allreduce(own.numpy(), out.numpy(), MPI.SUM)
            return out.div_(world.size)

        return call

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise Unavailable(world.gloo)
        own = raw.tensor(nbytes, world.rank)

        def call(number: int) -> torch.Tensor:
            torch.distributed.all_reduce(own)
            return own.div_(world.size)

        return call

    def expected(nbytes: int) -> torch.Tensor:
        return raw.tensor(nbytes, 0) * ((world.size + 1) / 2)

    return Table(
        "allreduce",
        "allreduce, average",
        sizes,
        (
            Rival("asyncddp", ours),
            Rival("MPI Allreduce + div", mpi),
            Rival("asyncddp in place", in_place),
            Rival("gloo all_reduce + div in place", gloo),
        ),
        expected=expected,
    )
