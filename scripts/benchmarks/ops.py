"""``ops``: the time of each verb, from 4 B to 256 MB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

import asyncddp as bf
from asyncddp import topology
from asyncddp.shm.memory_limit import memory_limit
from asyncddp.topology import Schedule
from benchmarks import baselines, mixing
from benchmarks.bare_transports import exchange_table, sum_table
from benchmarks.baselines import CHANGE, FILL, GATHER, SCATTER, mean_of_all, rival
from benchmarks.machine_info import oversubscribed
from benchmarks.mixing import IN_PLACE, LIMIT, MPI4PY, OURS, OUT
from benchmarks.tables import KB, MB, RankGroup, Rival, Target, TimingTable

_SIZES = tuple(4 * 4**power for power in range(14))  # 4 B … 256 MB
_BUFFERS = 18  # of the largest size that the rivals of a table hold on each rank, all in all
_QUICK = (4 * KB, 4 * MB)
_TRANSPORT_LIMIT = 64 * MB
MPI_SUM, GLOO_SUM = "MPI: Allreduce + div", "gloo: all_reduce + div in place"
NEIGHBOR = "neighbor_allreduce: one peer"
_HIERARCHICAL = ("hierarchical_allreduce", "hierarchical_neighbor_allreduce")

# Of BlueFog's calls, measured on two cores of the same kind of machine: 0.55 ms and 52 ms.
_ONE_PEER_AIMS: Sequence[Target] = (
    Target(OURS, 3, MPI4PY, sizes=(4, 4 * KB), seconds=20e-6),
    Target(OURS, sizes=(4, 4 * KB), seconds=22e-6, words="≤ 22 µs, 1/25 of BlueFog"),
    Target(OURS, 1.3, LIMIT, sizes=(MB, inf)),
    Target(OURS, 1, MPI4PY, sizes=(MB, inf)),
    Target(OURS, sizes=(64 * MB, 64 * MB), seconds=10.4e-3, words="≤ 10.4 ms, 1/5 of BlueFog"),
)
_CROWDED_AIMS: Sequence[Target] = (Target(OURS, 1.3, MPI4PY),)
_SHARED_AIMS = (Target(IN_PLACE, 1.05, LIMIT, sizes=(64 * MB, 64 * MB)),)
_SUM_AIMS = (Target(OURS, 1, (MPI_SUM, GLOO_SUM), sizes=(MB, inf)),)
_LATENCY = (4, 64 * KB)  # sizes at which agreeing costs more than the data
_ANY_SUM_AIMS = (
    Target(OURS, 2, MPI_SUM, sizes=_LATENCY),
    Target(OURS, sizes=(4, 4), seconds=40e-6),
    Target(
        NEIGHBOR,
        0.5,
        (OURS, MPI_SUM, GLOO_SUM),
        sizes=(MB, inf),
        words="neighbor_allreduce ≤ 0.5 x any allreduce",
    ),
)
_SMALL_AIMS = (
    Target(mixing.ONE_LIST, 1.3, mixing.ONE_CALL),
    Target(mixing.NEAR_LIST, 1.3, mixing.ONE_CALL),
    Target(mixing.MANY_CALLS, 3, mixing.ONE_CALL),
)
_CALLER_AIMS = (Target(mixing.ALONE, seconds=20e-6), Target(mixing.EACH, seconds=20e-6))

# newer names warn of nothing
_ALL_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


Body = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _mpi(call: Callable[..., Any], *more: Any, divide_by: int = 1) -> Body:
    """Return a collective of mpi4py, from one tensor into another."""

    def body(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
        call(own.numpy(), out.numpy(), *more)
        return out.div_(divide_by) if divide_by > 1 else out

    return body


def _gloo(call: Callable[..., Any], divide_by: int = 1) -> Body:
    """Return a collective of torch.distributed, from one tensor into another."""

    def body(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
        call(out, own)
        return out.div_(divide_by) if divide_by > 1 else out

    return body


def _gloo_mean(own: torch.Tensor, number: int) -> torch.Tensor:
    distributed.all_reduce(own)
    return own.div_(distributed.get_world_size())


def allreduce_table(
    world: RankGroup, one_peer: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``allreduce``, those who sum and divide by hand, and what one neighbour costs instead."""
    by_mpi = _mpi(world.comm.Allreduce, MPI.SUM, divide_by=world.size)
    return TimingTable(
        "allreduce",
        "allreduce, average",
        sizes,
        (
            rival(world, OURS, lambda own, number: bf.allreduce(own)),
            rival(world, OUT, lambda own, out, number: bf.allreduce(own, out=out), FILL),
            rival(world, IN_PLACE, lambda own, number: bf.allreduce_(own), CHANGE),
            rival(world, MPI_SUM, by_mpi, FILL),
            rival(world, GLOO_SUM, _gloo_mean, CHANGE, gloo=True),
            rival(world, NEIGHBOR, mixing.average, checked=False),  # of many ranks another average
        ),
        expected=partial(mean_of_all, world),
        begin=lambda: bf.set_topology(one_peer),
        targets=targets,
        compare=(OURS, MPI_SUM),
    )


class _Verbs:
    """Tables of the other verbs.

    Args:
        world: The ranks.
        one_peer: Schedule of one neighbour in each round.
        judged: Whether latencies are held to MPI's.
    """

    def __init__(self, world: RankGroup, one_peer: Schedule, *, judged: bool) -> None:
        self._world, self._one_peer, self._judged = world, one_peer, judged

    def _table(
        self,
        verb: str,
        title: str,
        sizes: Sequence[int],
        rivals: Sequence[Rival],
        mpi: int = -1,
        **options: Any,
    ) -> TimingTable:
        """Return a table whose rivals before MPI's take three times its latency at most."""
        names = [one.name for one in rivals]
        by_mpi, latencies = names[mpi], (0, _LATENCY[1])
        ours = [name for name in names if name in (OURS, *_HIERARCHICAL)] if self._judged else []
        targets = [Target(name, 3, by_mpi, sizes=latencies) for name in ours]
        compare = (names[0], by_mpi)
        return TimingTable(verb, title, sizes, rivals, targets=targets, compare=compare, **options)

    def reduce_scatter(self, sizes: Sequence[int]) -> TimingTable:
        """``reduce_scatter``, and those who sum and divide by hand; sizes are of a part."""
        world, n = self._world, self._world.size
        by_mpi = _mpi(world.comm.Reduce_scatter_block, MPI.SUM, divide_by=n)
        by_gloo = _gloo(_REDUCE_SCATTER, divide_by=n)
        rivals = (
            rival(world, OURS, lambda own, number: bf.reduce_scatter(own), SCATTER[:1]),
            rival(world, OUT, lambda own, out, number: bf.reduce_scatter(own, out=out), SCATTER),
            rival(world, "MPI: Reduce_scatter_block + div", by_mpi, SCATTER),
            rival(world, "gloo: reduce_scatter_single + div", by_gloo, SCATTER, gloo=True),
        )

        def expected(nbytes: int) -> torch.Tensor:
            return mean_of_all(world, nbytes * n).view(n, -1)[world.rank]

        parts = [size for size in sizes if size * n <= max(sizes)]
        title, size_is = "reduce_scatter, average", "part of a rank"
        return self._table(
            "reduce_scatter", title, parts, rivals, 2, size_is=size_is, expected=expected
        )

    def allgather(self, sizes: Sequence[int]) -> TimingTable:
        """``allgather``, and the same with memory for the result laid out before."""
        world = self._world
        rivals = (
            rival(world, OURS, lambda own, number: bf.allgather(own)),
            rival(world, "MPI: Allgather", _mpi(world.comm.Allgather), GATHER),
            rival(world, "gloo: all_gather_single", _gloo(_ALL_GATHER), GATHER, gloo=True),
        )

        def expected(nbytes: int) -> torch.Tensor:
            return torch.cat([baselines.tensor(nbytes, rank) for rank in range(world.size)])

        size_is = "tensor of a rank"
        return self._table(
            "allgather", "allgather", sizes, rivals, 1, size_is=size_is, expected=expected
        )

    def broadcast(self, sizes: Sequence[int]) -> TimingTable:
        """``broadcast`` of each rank in turn, so that no root runs ahead of the others."""
        world, n = self._world, self._world.size

        def by_mpi(own: torch.Tensor, number: int) -> torch.Tensor:
            world.comm.Bcast(own.numpy(), number % n)
            return own

        def by_gloo(own: torch.Tensor, number: int) -> torch.Tensor:
            distributed.broadcast(own, number % n)
            return own

        rivals = (
            rival(world, OURS, lambda own, number: bf.broadcast(own, number % n)),
            rival(world, "MPI: Bcast", by_mpi, CHANGE),
            rival(world, "gloo: broadcast", by_gloo, CHANGE, gloo=True),
        )
        expected = partial(baselines.tensor, rank=0)
        title = "broadcast, roots in turn"
        return self._table("broadcast", title, sizes, rivals, 1, expected=expected)

    def barrier(self) -> TimingTable:
        """``barrier``."""
        world = self._world
        rivals = (
            rival(world, OURS, lambda number: bf.barrier(), ()),
            rival(world, "MPI: Barrier", lambda number: world.comm.Barrier(), ()),
            rival(world, "gloo: barrier", lambda number: distributed.barrier(), (), gloo=True),
        )
        return self._table("barrier", "barrier", (0,), rivals, 1)

    def neighbor_allgather(self, sizes: Sequence[int]) -> TimingTable:
        """``neighbor_allgather`` from one neighbour per call."""
        world, schedule = self._world, self._one_peer
        rounds = [schedule.neighbors(world.rank, k) for k in range(schedule.period or 1)]

        def by_mpi(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
            near = rounds[number % len(rounds)]
            (source,), (target,) = near.src_weights, near.dst_ranks
            world.comm.Sendrecv(own.numpy(), target, recvbuf=out.numpy(), source=source)
            return out

        rivals = (
            rival(world, OURS, lambda own, number: bf.neighbor_allgather(own, round=number)),
            rival(world, "mpi4py: Sendrecv", by_mpi, FILL),
        )
        expected = partial(baselines.tensor, rank=next(iter(rounds[0].src_weights)))
        title = "neighbor_allgather, one peer per call"
        shared: dict[str, Any] = {"begin": lambda: bf.set_topology(schedule), "expected": expected}
        return self._table("neighbor_allgather", title, sizes, rivals, **shared)

    def hierarchical(self, sizes: Sequence[int]) -> TimingTable:
        """The hierarchical averages, of which one machine makes averages over all ranks."""
        world = self._world
        by_mpi = _mpi(world.comm.Allreduce, MPI.SUM, divide_by=world.size)
        rivals = (
            rival(world, _HIERARCHICAL[0], lambda own, k: bf.hierarchical_allreduce(own)),
            rival(world, _HIERARCHICAL[1], lambda own, k: bf.hierarchical_neighbor_allreduce(own)),
            rival(world, MPI_SUM, by_mpi, FILL),
        )
        return self._table(
            "hierarchical",
            "hierarchical averages on one machine",
            sizes,
            rivals,
            expected=partial(mean_of_all, world),
            begin=lambda: bf.set_machine_topology(topology.complete(bf.machine_size())),
        )


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    limit = memory_limit()  # of all ranks, on one machine
    sizes = _QUICK if quick else [n for n in _SIZES if _BUFFERS * world.size * n <= limit]
    transport_sizes = [size for size in sizes if size <= _TRANSPORT_LIMIT]
    small = [4 * KB] if quick else [4, 4 * KB, 64 * KB]
    caller_sizes = (4, 4 * KB) if quick else (4, 4 * KB, 64 * KB, MB)
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.as_schedule(topology.exponential_two(world.size))
    bound = not oversubscribed(world)  # the aims are for ranks with a core of their own each
    verbs = _Verbs(world, one_peer, judged=bound)
    title = "neighbor_allreduce, one peer per call"
    sum_aims = (*(_SUM_AIMS if world.size == 2 else ()), *_ANY_SUM_AIMS)

    mixing_aims = _ONE_PEER_AIMS if bound else _CROWDED_AIMS

    def aims(*targets: Target) -> Sequence[Target]:
        return targets if bound else ()

    return [
        mixing.mixing_table(world, "one_peer", title, one_peer, sizes, mixing_aims),
        mixing.mixing_table(world, "exp2", "neighbor_allreduce, exponential-2 graph", exp2, sizes),
        mixing.shared_table(world, one_peer, sizes, aims(*_SHARED_AIMS)),
        allreduce_table(world, one_peer, sizes, aims(*sum_aims)),
        verbs.reduce_scatter(sizes),
        verbs.allgather(sizes),
        verbs.broadcast(small),
        verbs.barrier(),
        verbs.neighbor_allgather(small),
        verbs.hierarchical(small),
        exchange_table(world, transport_sizes),
        sum_table(world, transport_sizes),
        mixing.small_table(world, one_peer, aims(*_SMALL_AIMS)),
        mixing.caller_table(world, one_peer, caller_sizes, aims(*_CALLER_AIMS)),
    ]
