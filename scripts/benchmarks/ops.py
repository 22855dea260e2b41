"""``ops``: the time of each verb, from 4 B to 256 MB."""

from __future__ import annotations

from collections.abc import Sequence

from asyncddp import topology
from asyncddp.shm.memory_limit import memory_limit
from benchmarks.machine_info import oversubscribed
from benchmarks.tables import RankGroup, Target, TimingTable
from benchmarks.verbs.allgather_table import MPI_ALLGATHER, allgather_table
from benchmarks.verbs.allreduce_table import GLOO_SUM, MPI_SUM, NEIGHBOR, allreduce_table
from benchmarks.verbs.latency_tables import (
    HIERARCHICAL,
    MPI_BARRIER,
    MPI_BROADCAST,
    MPI_GATHER,
    MPI_MEAN,
    barrier_table,
    broadcast_table,
    hierarchical_table,
    neighbor_allgather_table,
)
from benchmarks.verbs.neighbor_allreduce_table import IN_PLACE, LIMIT, MPI4PY, OURS, mixing_table
from benchmarks.verbs.reduce_scatter_table import MPI_REDUCE_SCATTER, reduce_scatter_table
from benchmarks.verbs.shared_memory_table import shared_table
from benchmarks.verbs.small_tensor_tables import (
    ALONE,
    EACH,
    MANY_CALLS,
    NEAR_LIST,
    ONE_CALL,
    ONE_LIST,
    caller_table,
    small_table,
)
from benchmarks.verbs.transports_table import exchange_table, sum_table

__all__ = ["tables"]

_KB, _MB = 1024, 1024 * 1024
_INF = float("inf")
_SIZES = tuple(4 * 4**power for power in range(14))  # 4 B … 256 MB
_BUFFERS = 16  # of the largest size that the rivals of a table hold on each rank, all in all
_QUICK = (4 * _KB, 4 * _MB)
_TRANSPORT_LIMIT = 64 * _MB

# Of BlueFog's calls, measured on two cores of the same kind of machine: 0.55 ms and 52 ms.
_ONE_PEER_AIMS = (
    Target(OURS, 3, MPI4PY, sizes=(4, 4 * _KB), seconds=20e-6),
    Target(OURS, sizes=(4, 4 * _KB), seconds=22e-6, words="≤ 22 µs, 1/25 of BlueFog"),
    Target(OURS, 1.3, LIMIT, sizes=(_MB, _INF)),
    Target(OURS, 1, MPI4PY, sizes=(_MB, _INF)),
    Target(OURS, sizes=(64 * _MB, 64 * _MB), seconds=10.4e-3, words="≤ 10.4 ms, 1/5 of BlueFog"),
)
_CROWDED_AIMS = (Target(OURS, 1.3, MPI4PY),)
_SHARED_AIMS = (Target(IN_PLACE, 1.05, LIMIT, sizes=(64 * _MB, 64 * _MB)),)
_SUM_AIMS = (Target(OURS, 1, (MPI_SUM, GLOO_SUM), sizes=(_MB, _INF)),)
_LATENCY = (4, 64 * _KB)  # sizes at which agreeing costs more than the data
_SMALL_SUM_AIMS = (
    Target(OURS, 2, MPI_SUM, sizes=_LATENCY),
    Target(OURS, sizes=(4, 4), seconds=40e-6),
)
_NEIGHBOR_AIMS = (
    Target(
        NEIGHBOR,
        0.5,
        (OURS, MPI_SUM, GLOO_SUM),
        sizes=(_MB, _INF),
        words="neighbor_allreduce ≤ 0.5 x any allreduce",
    ),
)
_SMALL_AIMS = (
    Target(ONE_LIST, 1.3, ONE_CALL),
    Target(NEAR_LIST, 1.3, ONE_CALL),
    Target(MANY_CALLS, 3, ONE_CALL),
)
_CALLER_AIMS = (Target(ALONE, seconds=20e-6), Target(EACH, seconds=20e-6))


def _latency_aims(mpi: str, *ours: str) -> tuple[Target, ...]:
    return tuple(Target(verb, 3, mpi, sizes=(0, _LATENCY[1])) for verb in ours or (OURS,))


def _sizes(world: RankGroup) -> Sequence[int]:
    """List the sizes that fit in memory with all ranks on one machine."""
    limit = memory_limit()
    return [size for size in _SIZES if _BUFFERS * world.size * size <= limit]


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    sizes = _QUICK if quick else _sizes(world)
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.as_schedule(topology.exponential_two(world.size))
    caller_sizes = (4, 4 * _KB) if quick else (4, 4 * _KB, 64 * _KB, _MB)
    bound = not oversubscribed(world)  # the aims are for ranks with a core of their own each
    mixing_aims = _ONE_PEER_AIMS if bound else _CROWDED_AIMS
    sum_aims = (*(_SUM_AIMS if world.size == 2 else ()), *_SMALL_SUM_AIMS, *_NEIGHBOR_AIMS)
    small = [4 * _KB] if quick else [4, 4 * _KB, 64 * _KB]

    def latency(mpi: str, *ours: str) -> tuple[Target, ...]:
        return _latency_aims(mpi, *ours) if bound else ()

    title = "neighbor_allreduce, one peer per call"
    return [
        mixing_table(world, "one_peer", title, one_peer, sizes, mixing_aims),
        mixing_table(world, "exp2", "neighbor_allreduce, exponential-2 graph", exp2, sizes),
        shared_table(world, one_peer, sizes, _SHARED_AIMS if bound else ()),
        allreduce_table(world, one_peer, sizes, sum_aims if bound else ()),
        reduce_scatter_table(world, sizes, latency(MPI_REDUCE_SCATTER)),
        allgather_table(world, sizes, latency(MPI_ALLGATHER)),
        broadcast_table(world, small, latency(MPI_BROADCAST)),
        barrier_table(world, latency(MPI_BARRIER)),
        neighbor_allgather_table(world, one_peer, small, latency(MPI_GATHER)),
        hierarchical_table(world, small, latency(MPI_MEAN, *HIERARCHICAL)),
        exchange_table(world, [size for size in sizes if size <= _TRANSPORT_LIMIT]),
        sum_table(world, [size for size in sizes if size <= _TRANSPORT_LIMIT]),
        small_table(world, one_peer, _SMALL_AIMS if bound else ()),
        caller_table(world, one_peer, caller_sizes, _CALLER_AIMS if bound else ()),
    ]
