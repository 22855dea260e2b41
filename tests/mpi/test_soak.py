"""Thousands of random verbs in a row: every result right, and no memory lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.tensors.dtypes import DTYPES
from tests.support import on
from tests.support.oracle import AVERAGING, check, held, mixed, options, summed

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (40, 40), (9_000,)]
GRAPHS = ["ring", "exponential_two", "complete", "star"]
WARM = 0.3
"""Part of a run after which memory is first looked at."""


@dataclass
class Started:
    """A verb under way, and what to do with its result."""

    handle: Any
    check: Callable[[Any], None]


@dataclass
class Plan:
    """One verb, the same on all ranks: what is drawn of the generator that they share."""

    number: int
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: torch.dtype
    root: int
    rows: list[int]
    in_place: bool

    @classmethod
    def draw(cls, number: int, shared: random.Random) -> Plan:
        """The next one."""
        return cls(
            number=number,
            kind=shared.choice(sorted(STARTS)),
            dtype=shared.choice(AVERAGING),
            shape=shared.choice(SHAPES),
            whole=shared.choice(list(DTYPES)),
            root=shared.randrange(bf.size()),
            rows=[shared.randrange(4) for _ in range(bf.size())],
            in_place=shared.random() < 0.3,
        )

    def x(self, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What a rank holds."""
        return held(rank, self.shape, dtype or self.dtype, self.number)

    def ragged(self, rank: int) -> torch.Tensor:
        """What a rank holds where rows may differ."""
        return held(rank, (self.rows[rank], 3), self.whole, self.number)

    @property
    def name(self) -> str:
        """Names come again and again."""
        return f"layer {self.number % 50}"


def start(plan: Plan, verb: str, x: torch.Tensor, want: torch.Tensor, *args: Any, **more: Any):
    """Start a verb in its ordinary form, or in place."""
    form = f"{verb}_nonblocking" + ("_" if plan.in_place else "")
    like = x.clone()
    return Started(getattr(bf, form)(x, *args, **more), lambda result: check(result, like, want))


def neighbor_allreduce(plan: Plan) -> Started:
    x = plan.x(bf.rank())
    near = topology.neighbors_of(bf.load_topology(), bf.rank())
    want = mixed(bf.rank(), near.self_weight, near.src_weights, plan.x)
    return start(plan, "neighbor_allreduce", x, want, name=plan.name, **options(plan.dtype))


def moved(plan: Plan) -> Started:
    """Dynamic neighbours, another shift each time."""
    n, me = bf.size(), bf.rank()
    shift = 1 + plan.root % max(1, n - 1)
    source, target = (me - shift) % n, (me + shift) % n
    want = mixed(me, 0.25, {source: 0.75}, plan.x)
    arguments = {"self_weight": 0.25, "src_weights": {source: 0.75}, "dst_weights": [target]}
    x = plan.x(me)
    return start(
        plan, "neighbor_allreduce", x, want, name=plan.name, **arguments, **options(plan.dtype)
    )


def gossip(plan: Plan) -> Started:
    partner = bf.rank() ^ 1
    want = mixed(bf.rank(), 0.5, {partner: 0.5}, plan.x)
    x = plan.x(bf.rank())
    return start(plan, "pair_gossip", x, want, partner, name=plan.name, **options(plan.dtype))


def neighbor_allgather(plan: Plan) -> Started:
    want = torch.cat([plan.ragged(bf.rank())[:0], *map(plan.ragged, bf.in_neighbor_ranks())])
    handle = bf.neighbor_allgather_nonblocking(plan.ragged(bf.rank()), name=plan.name)
    return Started(handle, lambda result: assert_equal(result, want))


def total(plan: Plan) -> Started:
    want = summed(range(bf.size()), lambda r: plan.x(r, plan.whole))
    return start(plan, "allreduce", plan.x(bf.rank(), plan.whole), want, average=False)


def mean(plan: Plan) -> Started:
    weights = {rank: 1 / bf.size() for rank in range(bf.size()) if rank != bf.rank()}
    want = mixed(bf.rank(), 1 / bf.size(), weights, plan.x)
    return start(plan, "allreduce", plan.x(bf.rank()), want, **options(plan.dtype))


def machine_total(plan: Plan) -> Started:
    first = 2 * bf.machine_rank()
    want = summed((first, first + 1), lambda r: plan.x(r, plan.whole))
    return start(plan, "local_allreduce", plan.x(bf.rank(), plan.whole), want, average=False)


def hierarchical(plan: Plan) -> Started:
    n = bf.size()
    weights = {rank: 1 / n for rank in range(n) if rank != bf.rank()}
    want = mixed(bf.rank(), 1 / n, weights, plan.x)
    x = plan.x(bf.rank())
    return start(plan, "hierarchical_neighbor_allreduce", x, want, **options(plan.dtype))


def broadcast(plan: Plan) -> Started:
    x, want = plan.x(bf.rank(), plan.whole), plan.x(plan.root, plan.whole)
    return start(plan, "broadcast", x, want.to(x.dtype), plan.root)


def allgather(plan: Plan) -> Started:
    want = torch.cat([plan.ragged(rank) for rank in range(bf.size())])
    handle = bf.allgather_nonblocking(plan.ragged(bf.rank()))
    return Started(handle, lambda result: assert_equal(result, want))


def objects(plan: Plan) -> Started:
    handle = bf.allgather_object_nonblocking((bf.rank(), plan.number))
    want = [(rank, plan.number) for rank in range(bf.size())]
    return Started(handle, lambda result: assert_same(result, want))


def barrier(plan: Plan) -> Started:
    return Started(bf.barrier_nonblocking(), lambda result: assert_same(result, None))


ANY_ORDER = {
    "gossip": gossip,
    "moved": moved,
    "neighbor_allgather": neighbor_allgather,
    "neighbor_allreduce": neighbor_allreduce,
}
IN_ORDER = {
    "allgather": allgather,
    "barrier": barrier,
    "broadcast": broadcast,
    "hierarchical": hierarchical,
    "machine_total": machine_total,
    "mean": mean,
    "objects": objects,
    "total": total,
}
STARTS = {**ANY_ORDER, **IN_ORDER}


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(one, other)


def assert_same(one: Any, other: Any) -> None:
    assert one == other


def arranged(plans: list[Plan], mine: random.Random) -> list[Plan]:
    """An order of this rank's own: collectives, and uses of one name, stay in theirs."""
    queues: dict[str, list[Plan]] = {}
    for plan in plans:
        queues.setdefault("collectives" if plan.kind in IN_ORDER else plan.name, []).append(plan)
    order = [key for key, queue in queues.items() for _ in queue]
    mine.shuffle(order)
    return [queues[key].pop(0) for key in order]


def soak(verbs: int, seed: int) -> tuple[int, float, float]:
    """Random verbs; gives how many, and the memory after warming up and at the end, in bytes."""
    shared, mine = random.Random(seed), random.Random(1000 * seed + bf.rank())
    process = psutil.Process()
    done, warm = 0, 0
    bf.set_machine_topology(topology.complete(bf.machine_size()))
    while done < verbs:
        bf.set_topology(getattr(topology, shared.choice(GRAPHS))(bf.size()))
        plans = [Plan.draw(done + k, shared) for k in range(shared.choice([1, 1, 2, 8, 25]))]
        started = [STARTS[plan.kind](plan) for plan in arranged(plans, mine)]
        mine.shuffle(started)
        for verb in started:
            verb.check(verb.handle.wait())
        done += len(plans)
        if not warm and done > WARM * verbs:
            warm = process.memory_info().rss
    return done, warm, process.memory_info().rss


SETTINGS = {"ranks_per_machine": 2, "timeout": 60}


@on("loopback-4", "mpi-4")
def test_random_verbs_stay_right(world):
    """500 verbs under mpirun, every kind of them, in another order on each rank."""
    verbs = 500 if world.transport == "mpi" else 200
    assert all(done >= verbs for done, _, _ in world.run(soak, verbs, 2026, settings=SETTINGS))


@pytest.mark.soak
@on("loopback-4", "mpi-4")
def test_random_verbs_stay_right_and_lose_no_memory(world, seed):
    """5,000 verbs under mpirun: no mismatch, and memory grows by less than 5 % after warming up."""
    verbs = 5_000 if world.transport == "mpi" else 1_000
    for done, warm, end in world.run(soak, verbs, seed, settings=SETTINGS, limit=240):
        assert done >= verbs
        assert end < 1.05 * warm, f"{warm / 2**20:.1f} MiB became {end / 2**20:.1f} MiB"
