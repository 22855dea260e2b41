"""``torch-distributed``: verbs and DDP steps of torch.distributed, by this backend and by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import asyncddp.integrations.torch_distributed as backend
from benchmarks.tables import KB, MB, Call, RankGroup, Rival, Target, TimingTable
from benchmarks.training_models import Workload, benched_models
from benchmarks.training_step import LOCAL, Method, TrainingSetup, step_table

OURS, GLOO = "asyncddp", "gloo"
OURS_ASYNC, GLOO_ASYNC = "asyncddp, async", "gloo, async"
_SIZES = tuple(4 * 4**power for power in range(14))  # 4 B … 256 MB
_QUICK = (4 * KB, 4 * MB)
_ALL_RANKS_MOST = 16 * MB  # of a tensor that all ranks send to all
_AT_LEAST_GLOO = (Target(OURS, 1, GLOO), Target(OURS_ASYNC, 1, GLOO_ASYNC))
_TWICE_GLOO = (
    Target(OURS, 0.5, GLOO, sizes=(4 * MB, inf)),
    Target(OURS_ASYNC, 0.5, GLOO_ASYNC, sizes=(4 * MB, inf)),
)
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Verb = Callable[..., Any]
"""The call, given ``group`` and ``async_op``; it may have begun when it returns."""


@lru_cache(maxsize=1)
def _group() -> dist.ProcessGroup:
    """Make the group of all ranks on this backend, beside gloo's default group; collective."""
    return cast("dist.ProcessGroup", dist.new_group(backend=backend.BACKEND))


def _per_rank(own: torch.Tensor, world: RankGroup) -> list[torch.Tensor]:
    return [torch.ones_like(own) for _ in range(world.size)]


def _on_root(own: torch.Tensor, world: RankGroup) -> list[torch.Tensor] | None:
    return _per_rank(own, world) if world.rank == 0 else None


def _ring(own: torch.Tensor, world: RankGroup) -> Verb:
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    out = torch.empty_like(own)

    def call(group: dist.ProcessGroup, async_op: bool) -> None:
        sent = dist.isend(own, after, group=group)
        received = dist.irecv(out, before, group=group)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()

    return call


_RING = "isend and irecv in a ring"
_VERBS: dict[str, Callable[[torch.Tensor, RankGroup], Verb]] = {
    "all_reduce": lambda own, world: partial(dist.all_reduce, own.zero_()),
    "broadcast": lambda own, world: partial(dist.broadcast, own, 0),
    "reduce": lambda own, world: partial(dist.reduce, own.zero_(), 0),
    "all_gather_into_tensor": lambda own, world: partial(
        _ALL_GATHER, own.new_empty(world.size * own.numel()), own
    ),
    "all_gather": lambda own, world: partial(dist.all_gather, _per_rank(own, world), own),
    "gather": lambda own, world: partial(dist.gather, own, _on_root(own, world), 0),
    "scatter": lambda own, world: partial(dist.scatter, own, _on_root(own, world), 0),
    "reduce_scatter_tensor": lambda own, world: partial(
        _REDUCE_SCATTER, own.new_empty(own.numel() // world.size), own
    ),
    "all_to_all_single": lambda own, world: partial(
        dist.all_to_all_single, torch.empty_like(own), own
    ),
    _RING: _ring,
    "barrier": lambda own, world: dist.barrier,
}
"""Makes the call of a verb from this rank's tensor."""
_IN_PARTS = ("reduce_scatter_tensor", "all_to_all_single")
_TO_ALL_SIZES = ("all_reduce", "broadcast")


def _verb_table(world: RankGroup, verb: str, sizes: Sequence[int]) -> TimingTable:
    def rival(name: str) -> Rival:
        def prepare(nbytes: int) -> Call:
            world.need_gloo()
            parts = world.size if verb in _IN_PARTS else 1
            own = torch.ones(max(1, nbytes // 4 // parts) * parts)
            ours = name.startswith(OURS)
            group = _group() if ours else dist.distributed_c10d._get_default_group()
            started = _VERBS[verb](own, world)
            begin = partial(started, group=group, async_op=name.endswith("async"))

            def call(number: int) -> None:
                work = begin()
                if work is not None:
                    work.wait()

            return call

        return Rival(name, prepare)

    names = [OURS, GLOO] if verb == _RING else [OURS, GLOO, OURS_ASYNC, GLOO_ASYNC]
    targets = _AT_LEAST_GLOO[: len(names) // 2] + (_TWICE_GLOO if verb == "all_reduce" else ())
    key, title = verb.replace(" ", "_"), f"torch.distributed: {verb}"
    return TimingTable(key, title, sizes, [*map(rival, names)], targets=targets)


def _ddp_table(world: RankGroup, workload: Workload) -> TimingTable:
    ours, gloo = f"DDP {OURS}", f"DDP {GLOO}"

    def wrap(training: TrainingSetup, *, on_ours: bool) -> None:
        group = _group() if on_ours else None
        training.model = DistributedDataParallel(training.model, process_group=group)

    methods: dict[str, Method] = {
        LOCAL: lambda training: None,
        ours: partial(wrap, on_ours=True),
        gloo: partial(wrap, on_ours=False),
    }
    title = f"a DDP step of {workload.title}"
    return step_table(
        world, workload, methods, f"ddp_{workload.key}", title, [Target(ours, 1, gloo)]
    )


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    found = []
    for verb in _VERBS:
        most = inf if verb in _TO_ALL_SIZES else _ALL_RANKS_MOST
        sizes = _QUICK if quick else [size for size in _SIZES if size <= most]
        found.append(_verb_table(world, verb, [4] if verb == "barrier" else sizes))
    return [*found, *(_ddp_table(world, workload) for workload in benched_models(quick=quick))]
