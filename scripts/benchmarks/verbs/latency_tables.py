"""Benchmark tables of verbs that matter for small tensors, beside MPI and gloo.

Those are ``broadcast``, ``barrier``, ``neighbor_allgather`` and the hierarchical averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp import topology
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.verbs.neighbor_allreduce_table import OURS

__all__ = [
    "HIERARCHICAL",
    "MPI_BARRIER",
    "MPI_BROADCAST",
    "MPI_GATHER",
    "MPI_MEAN",
    "barrier_table",
    "broadcast_table",
    "hierarchical_table",
    "neighbor_allgather_table",
]

MPI_BROADCAST, MPI_BARRIER = "MPI: Bcast", "MPI: Barrier"
MPI_GATHER, MPI_MEAN = "mpi4py: Sendrecv", "MPI: Allreduce + div"
HIERARCHICAL = ("hierarchical_allreduce", "hierarchical_neighbor_allreduce")


def _with_gloo(world: RankGroup, call: Call) -> Call:
    if world.gloo is not None:
        raise RivalUnavailableError(world.gloo)
    return call


def broadcast_table(
    world: RankGroup, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``broadcast`` of each rank in turn, so that no root runs ahead of the others."""

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.broadcast(own, number % world.size)

    def mpi(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)

        def call(number: int) -> torch.Tensor:
            world.comm.Bcast(own.numpy(), number % world.size)
            return own

        return call

    def gloo(nbytes: int) -> Call:
        own = baselines.tensor(nbytes, world.rank)

        def call(number: int) -> torch.Tensor:
            torch.distributed.broadcast(own, number % world.size)
            return own

        return _with_gloo(world, call)

    return TimingTable(
        "broadcast",
        "broadcast, roots in turn",
        sizes,
        (Rival(OURS, ours), Rival(MPI_BROADCAST, mpi), Rival("gloo: broadcast", gloo)),
        expected=lambda nbytes: baselines.tensor(nbytes, 0),
        targets=targets,
        compare=(OURS, MPI_BROADCAST),
    )


def barrier_table(world: RankGroup, targets: Sequence[Target] = ()) -> TimingTable:
    """``barrier``."""

    def ours(nbytes: int) -> Call:
        return lambda number: bf.barrier()

    def mpi(nbytes: int) -> Call:
        return lambda number: world.comm.Barrier()

    def gloo(nbytes: int) -> Call:
        return _with_gloo(world, lambda number: torch.distributed.barrier())

    return TimingTable(
        "barrier",
        "barrier",
        (0,),
        (Rival(OURS, ours), Rival(MPI_BARRIER, mpi), Rival("gloo: barrier", gloo)),
        targets=targets,
        compare=(OURS, MPI_BARRIER),
    )


def neighbor_allgather_table(
    world: RankGroup, one_peer: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``neighbor_allgather`` from one neighbour per call."""

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allgather(own, round=number)

    def mpi(nbytes: int) -> Call:
        rounds = [one_peer.neighbors(world.rank, k) for k in range(one_peer.period or 1)]
        own = baselines.own(nbytes, world.rank)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            near = rounds[number % len(rounds)]
            (source,), (target,) = near.src_weights, near.dst_ranks
            world.comm.Sendrecv(own.numpy(), target, recvbuf=out.numpy(), source=source)
            return out

        return call

    def expected(nbytes: int) -> torch.Tensor:
        (source,) = one_peer.neighbors(world.rank, 0).src_weights
        return baselines.tensor(nbytes, source)

    return TimingTable(
        "neighbor_allgather",
        "neighbor_allgather, one peer per call",
        sizes,
        (Rival(OURS, ours), Rival(MPI_GATHER, mpi)),
        expected=expected,
        begin=lambda: bf.set_topology(one_peer),
        targets=targets,
        compare=(OURS, MPI_GATHER),
    )


def hierarchical_table(
    world: RankGroup, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """The hierarchical averages, of which one machine makes averages over all ranks."""

    def ours(verb: str, nbytes: int) -> Call:
        own, call = baselines.own(nbytes, world.rank), getattr(bf, verb)
        return lambda number: call(own)

    def mpi(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            world.comm.Allreduce(own.numpy(), out.numpy(), MPI.SUM)
            return out.div_(world.size)

        return call

    return TimingTable(
        "hierarchical",
        "hierarchical averages on one machine",
        sizes,
        (*(Rival(verb, partial(ours, verb)) for verb in HIERARCHICAL), Rival(MPI_MEAN, mpi)),
        expected=lambda nbytes: baselines.tensor(nbytes, 0) * ((world.size + 1) / 2),
        begin=lambda: bf.set_machine_topology(topology.complete(bf.machine_size())),
        targets=targets,
        compare=(HIERARCHICAL[0], MPI_MEAN),
    )
