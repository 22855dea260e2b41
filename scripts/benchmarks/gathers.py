"""All ranks' tensors in one: asyncddp beside MPI and gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import asyncddp as bf
from benchmarks import raw
from benchmarks.contract import Call, Rival, Table, Unavailable, World
from benchmarks.mixing import OURS

__all__ = ["allgather_table"]

_MPI = "MPI: Allgather"


def allgather_table(world: World, sizes: Sequence[int]) -> Table:
    """``allgather``, and the same with memory for the result laid out before."""

    def ours(nbytes: int) -> Call:
        own = raw.own(nbytes, world.rank)
        return lambda number: bf.allgather(own)

    def mpi(nbytes: int) -> Call:
        own = raw.own(nbytes, world.rank)
        out = own.new_empty(world.size * own.numel())

        def call(number: int) -> torch.Tensor:
            world.comm.Allgather(own.numpy(), out.numpy())
            return out

        return call

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise Unavailable(world.gloo)
        own = raw.own(nbytes, world.rank)
        out = own.new_empty(world.size * own.numel())
        # The newer of its two names warns of nothing.
        older = torch.distributed.all_gather_into_tensor
        gather = getattr(torch.distributed, "all_gather_single", older)

        def call(number: int) -> torch.Tensor:
            gather(out, own)
            return out

        return call

    return Table(
        "allgather",
        "allgather",
        sizes,
        (Rival(OURS, ours), Rival(_MPI, mpi), Rival("gloo: all_gather_single", gloo)),
        size_is="tensor of a rank",
        expected=lambda nbytes: torch.cat([raw.tensor(nbytes, r) for r in range(world.size)]),
    )
