"""``torch-distributed``: verbs and DDP steps of torch.distributed, by this backend and by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import asyncddp.integrations.torch_distributed as backend
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.training_models import Workload, convnet, narrow_mlp, transformer
from benchmarks.training_step import LOCAL, make_training

__all__ = ["tables"]

OURS, GLOO = "asyncddp", "gloo"
OURS_ASYNC, GLOO_ASYNC = "asyncddp, async", "gloo, async"
_KB, _MB = 1024, 1024 * 1024
_INF = float("inf")
_SIZES = tuple(4 * 4**power for power in range(14))  # 4 B … 256 MB
_QUICK = (4 * _KB, 4 * _MB)
_ALL_RANKS_MOST = 16 * _MB  # of a tensor that all ranks send to all
_AT_LEAST_GLOO = (Target(OURS, 1, GLOO), Target(OURS_ASYNC, 1, GLOO_ASYNC))
_TWICE_GLOO = (
    Target(OURS, 0.5, GLOO, sizes=(4 * _MB, _INF)),
    Target(OURS_ASYNC, 0.5, GLOO_ASYNC, sizes=(4 * _MB, _INF)),
)
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Verb = Callable[[int, int, dist.ProcessGroup], Callable[[bool], Any]]
"""Makes the call for bytes of a tensor, this rank and the group; it may be asynchronous."""


@lru_cache(maxsize=1)
def _group() -> dist.ProcessGroup:
    """Make the group of all ranks on this backend, beside gloo's default group; collective."""
    return cast("dist.ProcessGroup", dist.new_group(backend=backend.BACKEND))


def _allreduce(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own = torch.zeros(nbytes // 4)
    return lambda later: dist.all_reduce(own, group=group, async_op=later)


def _broadcast(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own = torch.full((nbytes // 4,), float(rank))
    return lambda later: dist.broadcast(own, 0, group=group, async_op=later)


def _reduce(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own = torch.zeros(nbytes // 4)
    return lambda later: dist.reduce(own, 0, group=group, async_op=later)


def _all_gather(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own = torch.full((nbytes // 4,), float(rank))
    out = torch.empty(dist.get_world_size(group) * own.numel())
    return lambda later: _ALL_GATHER(out, own, group=group, async_op=later)


def _all_gather_list(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own = torch.full((nbytes // 4,), float(rank))
    outs = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    return lambda later: dist.all_gather(outs, own, group=group, async_op=later)


def _gather(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own, ranks = torch.ones(nbytes // 4), dist.get_world_size(group)
    outs = [torch.empty_like(own) for _ in range(ranks)] if rank == 0 else None
    return lambda later: dist.gather(own, outs, 0, group=group, async_op=later)


def _scatter(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own, ranks = torch.ones(nbytes // 4), dist.get_world_size(group)
    parts = [torch.ones_like(own) for _ in range(ranks)] if rank == 0 else None
    return lambda later: dist.scatter(own, parts, 0, group=group, async_op=later)


def _reduce_scatter(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    ranks = dist.get_world_size(group)
    own = torch.ones(max(1, nbytes // 4 // ranks) * ranks)
    out = torch.empty(own.numel() // ranks)
    return lambda later: _REDUCE_SCATTER(out, own, group=group, async_op=later)


def _all_to_all(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    ranks = dist.get_world_size(group)
    own = torch.ones(max(1, nbytes // 4 // ranks) * ranks)
    out = torch.empty_like(own)
    return lambda later: dist.all_to_all_single(out, own, group=group, async_op=later)


def _barrier(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    return lambda later: dist.barrier(group, async_op=later)


def _ring(nbytes: int, rank: int, group: dist.ProcessGroup) -> Callable[[bool], Any]:
    own, ranks = torch.ones(nbytes // 4), dist.get_world_size(group)
    out = torch.empty_like(own)

    def call(later: bool) -> object:
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        sent = dist.isend(own, after, group=group)
        received = dist.irecv(out, before, group=group)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()
        return None

    return call


_VERBS = {
    "all_reduce": _allreduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather_into_tensor": _all_gather,
    "all_gather": _all_gather_list,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "isend and irecv in a ring": _ring,
}


def _rival(world: RankGroup, name: str, make: Verb, *, ours: bool, later: bool) -> Rival:
    def prepare(nbytes: int) -> Call:
        if world.gloo is not None:
            raise RivalUnavailableError(world.gloo)
        group = _group() if ours else dist.distributed_c10d._get_default_group()
        verb = make(nbytes, world.rank, group)

        def call(number: int) -> None:
            work = verb(later)
            if work is not None:
                work.wait()

        return call

    return Rival(name, prepare)


def _verb_table(world: RankGroup, verb: str, make: Verb, sizes: Sequence[int]) -> TimingTable:
    rivals = [
        _rival(world, OURS, make, ours=True, later=False),
        _rival(world, GLOO, make, ours=False, later=False),
    ]
    if make is not _ring:
        rivals += [
            _rival(world, OURS_ASYNC, make, ours=True, later=True),
            _rival(world, GLOO_ASYNC, make, ours=False, later=True),
        ]
    targets: tuple[Target, ...] = _AT_LEAST_GLOO if make is not _ring else _AT_LEAST_GLOO[:1]
    if make is _allreduce:
        targets += _TWICE_GLOO
    return TimingTable(
        verb.replace(" ", "_"), f"torch.distributed: {verb}", sizes, rivals, targets=targets
    )


def _step_table(world: RankGroup, workload: Workload) -> TimingTable:
    def rival(name: str, **options: object) -> Rival:
        def prepare(nbytes: int) -> Call:
            made = make_training(world, workload)
            if name != LOCAL:
                group = _group() if name.endswith(OURS) else None
                made.model = DistributedDataParallel(made.model, process_group=group)
            return made.step

        return Rival(name, prepare)

    ours, gloo = f"DDP {OURS}", f"DDP {GLOO}"
    return TimingTable(
        f"ddp_{workload.key}",
        f"a DDP step of {workload.title}",
        [workload.nbytes],
        [rival(LOCAL), rival(ours), rival(gloo)],
        size_is="model",
        targets=(Target(ours, 1, gloo),),
        lead=1,
        samples=workload.samples * world.size,
    )


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    found = []
    for verb, make in _VERBS.items():
        most = _INF if make in (_allreduce, _broadcast) else _ALL_RANKS_MOST
        sizes = _QUICK if quick else [size for size in _SIZES if size <= most]
        found.append(_verb_table(world, verb, make, sizes))
    found.append(_verb_table(world, "barrier", _barrier, [4]))
    mlp, conv, former = narrow_mlp(), convnet(), transformer()
    if quick:
        mlp, conv, former = narrow_mlp(4, layers=20), convnet(2, channels=8), transformer(1, 1, 64)
    return [*found, *(_step_table(world, workload) for workload in (mlp, conv, former))]
