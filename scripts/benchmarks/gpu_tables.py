"""What ``gpu`` measures of the verbs: averages over a wire, and what enqueuing them costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import distributed

import asyncddp as bf
import topology
from asyncddp.transport import cuda_staged
from benchmarks.contract import Aim, Call, Rival, Table, Unavailable, World
from benchmarks.gpu_device import Device, gpus

__all__ = ["COPY", "MB", "SLOWER", "Bench", "caller_table", "mixing_table", "piece_table"]

MB = 1 << 20
COPY = "limit: copy on the device"
OUT, IN, SLOWER = "pinned copy out", "pinned copy in", "pinned copy, the slower direction"
_PIECES = (1, 2, 4, 8, 16)  # MB


class Bench:
    """What the rivals of a table share.

    Args:
        world: The ranks.
        device: This rank's.
    """

    def __init__(self, world: World, device: Device) -> None:
        self.world, self.device = world, device
        self.schedule = topology.one_peer_exponential(world.size)
        self.read = lru_cache(maxsize=1)(self.own)  # one for all rivals that only read it

    def own(self, nbytes: int) -> torch.Tensor:
        """What this rank holds."""
        return self.device.held(nbytes, self.world.rank)

    def average(self, nbytes: int) -> torch.Tensor:
        """What this rank must have after round 0."""
        near = self.schedule.neighbors(self.world.rank, 0)
        total = self.own(nbytes).mul_(near.self_weight)
        for peer, weight in near.src_weights.items():
            total.add_(self.device.held(nbytes, peer), alpha=weight)
        return total

    def ended(self, work: Callable[[int], Any]) -> Call:
        """A call that lasts until the device is through with it."""

        def call(number: int) -> Any:
            result = work(number)
            self.device.wait()
            return result

        return call

    def begin(self) -> None:
        """All rivals average over the same schedule."""
        bf.set_topology(self.schedule)


def _ours(bench: Bench, nbytes: int, *, in_place: bool = False) -> Call:
    own = bench.own(nbytes) if in_place else bench.read(nbytes)
    verb = bf.neighbor_allreduce_ if in_place else bf.neighbor_allreduce
    return bench.ended(lambda number: verb(own, round=number))


def _copy(bench: Bench, nbytes: int) -> Call:
    own = bench.read(nbytes)
    out = torch.empty_like(own)
    return bench.ended(lambda number: out.copy_(own))


def _pinned(bench: Bench, nbytes: int, *, out: bool) -> Call:
    host = bench.device.host(nbytes)
    to, source = (host, bench.read(nbytes)) if out else (bench.own(nbytes), host)
    return bench.ended(lambda number: to.copy_(source, non_blocking=True))


def _slower(bench: Bench, nbytes: int) -> Call:
    """The direction that all ranks together find slower, when all copy at once."""
    calls, took = {}, {}
    for out in (True, False):
        calls[out] = _pinned(bench, nbytes, out=out)
        calls[out](0)
        bench.world.comm.Barrier()
        start = time.perf_counter()
        for number in range(3):
            calls[out](number)
        took[out] = max(bench.world.comm.allgather(time.perf_counter() - start))
    return calls[took[True] >= took[False]]


def _torch_exchange(bench: Bench, nbytes: int, *, backend: str) -> Call:
    """torch.distributed's messages and a lerp: out of pinned memory on gloo, on the GPU by NCCL.

    Raises:
        Unavailable: The back-end does not run here.
    """
    group = _group(bench.world, backend)
    near = bench.schedule.neighbors(bench.world.rank, 0)
    (source, weight), target = next(iter(near.src_weights.items())), near.dst_ranks[0]
    own = bench.read(nbytes)
    come, out = torch.empty_like(own), torch.empty_like(own)
    staged = backend == "gloo"
    given, taken = (bench.device.host(nbytes) for _ in "io") if staged else (own, come)

    def work(number: int) -> torch.Tensor:
        if staged:
            given.copy_(own, non_blocking=True)
            bench.device.wait()
        send = distributed.P2POp(distributed.isend, given, target, group)
        receive = distributed.P2POp(distributed.irecv, taken, source, group)
        for request in distributed.batch_isend_irecv([send, receive]):
            request.wait()
        if staged:
            come.copy_(taken, non_blocking=True)
        return torch.lerp(own, come, weight, out=out)

    return bench.ended(work)


def _group(world: World, backend: str) -> Any:
    if world.gloo is not None:
        raise Unavailable(world.gloo)
    if backend == "gloo":
        return None
    if gpus() < world.size:
        raise Unavailable(f"NCCL has a GPU for each of {world.size} ranks, or does not run")
    return distributed.new_group(backend=backend)


def mixing_table(bench: Bench, wire: str, sizes: Sequence[int]) -> Table:
    """``neighbor_allreduce`` over a wire, the limits beside it, and torch's own ways."""
    rivals = (
        Rival(wire, partial(_ours, bench)),
        Rival(f"{wire}, in place", partial(_ours, bench, in_place=True)),
        Rival(COPY, partial(_copy, bench), checked=False),
        Rival(OUT, partial(_pinned, bench, out=True), checked=False),
        Rival(IN, partial(_pinned, bench, out=False), checked=False),
        Rival(SLOWER, partial(_slower, bench), checked=False),
        Rival("gloo: pinned, messages + lerp", partial(_torch_exchange, bench, backend="gloo")),
        Rival("NCCL: messages + lerp", partial(_torch_exchange, bench, backend="nccl")),
    )
    aims = {
        "cuda_ipc": Aim(wire, 2, COPY, sizes=(64 * MB, float("inf"))),
        "cuda_staged": Aim(
            wire,
            1.25,
            SLOWER,
            sizes=(64 * MB, float("inf")),
            words="≥ 80% of the pinned copy's rate",
            told=lambda ratio: f"{1 / ratio:.0%}",
        ),
    }
    return Table(
        f"{wire}_{bench.world.size}",
        f"neighbor_allreduce by {wire}, one peer per call, {bench.world.size} ranks",
        sizes,
        rivals,
        expected=bench.average,
        begin=bench.begin,
        aims=[aims[wire]] if wire in aims else [],
        compare=(wire, COPY),
        note="All ranks at once, each call until the device is through with it.",
    )


def caller_table(bench: Bench, wire: str, sizes: Sequence[int]) -> Table:
    """Seconds until a non-blocking call returns; what it has begun ends off the clock."""

    def alone(nbytes: int) -> Call:
        own, start = bench.read(nbytes), bf.neighbor_allreduce_nonblocking
        return lambda number: start(own, name="alone", round=number)

    def finish(handle: bf.Handle[torch.Tensor]) -> torch.Tensor:
        result = handle.wait()
        bench.device.wait()
        return result

    return Table(
        f"caller_{wire}_{bench.world.size}",
        f"neighbor_allreduce_nonblocking by {wire}, the caller's time, {bench.world.size} ranks",
        sizes,
        (Rival(f"{wire}, enqueue", alone, finish=finish),),
        expected=bench.average,
        begin=bench.begin,
        aims=[Aim(f"{wire}, enqueue", seconds=30e-6)],
        compare=(),
    )


def piece_table(bench: Bench, sizes: Sequence[int]) -> Table:
    """What is staged, in pieces of several sizes; all ranks change the size together."""
    usual = cuda_staged._PIECE

    def pieces(megabytes: int, nbytes: int) -> Call:
        ours = _ours(bench, nbytes)

        def call(number: int) -> Any:
            cuda_staged._PIECE = megabytes * MB
            return ours(number)

        return call

    def end() -> None:
        cuda_staged._PIECE = usual

    return Table(
        f"pieces_{bench.world.size}",
        f"neighbor_allreduce by cuda_staged, in pieces, {bench.world.size} ranks",
        sizes,
        [Rival(f"{size} MB", partial(pieces, size)) for size in _PIECES],
        expected=bench.average,
        begin=bench.begin,
        end=end,
        compare=(),
        note=f"It takes pieces of {usual // MB} MB at present.",
    )
