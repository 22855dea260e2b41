"""Tables of ``gpu``: averages over a transport, and the time to enqueue them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any

import torch
from torch import distributed

import asyncddp as bf
from asyncddp import topology
from asyncddp.transport.cuda import staged_transport as cuda_staged
from benchmarks.gpu.device import Device, gpus
from benchmarks.tables import MB, Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.training_models import Workload
from benchmarks.training_step import (
    ATC,
    ATC_IN_BACKWARD,
    AWC,
    LOCAL,
    Method,
    our_methods,
    step_table,
)

COPY = "limit: copy on the device"
OUT, IN, SLOWER = "pinned copy out", "pinned copy in", "pinned copy, the slower direction"
_PIECES = (1, 2, 4, 8, 16)  # MB


class GpuTableSetup:
    """Settings that the rivals of a table share.

    Args:
        world: The ranks.
        device: This rank's.
    """

    def __init__(self, world: RankGroup, device: Device) -> None:
        self.world, self.device = world, device
        self.schedule = topology.one_peer_exponential(world.size)
        self.read = lru_cache(maxsize=1)(self.own)  # one for all rivals that only read it

    def own(self, nbytes: int) -> torch.Tensor:
        """Create this rank's input."""
        return self.device.held(nbytes, self.world.rank)

    def average(self, nbytes: int) -> torch.Tensor:
        """Compute the expected result of this rank after round 0."""
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

    @property
    def shared(self) -> dict[str, Any]:
        """What all tables of averages share: their beginning and their result."""
        return {"expected": self.average, "begin": lambda: bf.set_topology(self.schedule)}


def _ours(setup: GpuTableSetup, nbytes: int, *, in_place: bool = False) -> Call:
    own = setup.own(nbytes) if in_place else setup.read(nbytes)
    verb = bf.neighbor_allreduce_ if in_place else bf.neighbor_allreduce
    return setup.ended(lambda number: verb(own, round=number))


def _copy(setup: GpuTableSetup, nbytes: int) -> Call:
    own = setup.read(nbytes)
    out = torch.empty_like(own)
    return setup.ended(lambda number: out.copy_(own))


def _pinned(setup: GpuTableSetup, nbytes: int, *, out: bool) -> Call:
    host = setup.device.host(nbytes)
    to, source = (host, setup.read(nbytes)) if out else (setup.own(nbytes), host)
    return setup.ended(lambda number: to.copy_(source, non_blocking=True))


def _slower(setup: GpuTableSetup, nbytes: int) -> Call:
    """The direction that all ranks together find slower, when all copy at once."""
    calls, took = {}, {}
    for out in (True, False):
        calls[out] = _pinned(setup, nbytes, out=out)
        calls[out](0)
        setup.world.comm.Barrier()
        start = time.perf_counter()
        for number in range(3):
            calls[out](number)
        took[out] = max(setup.world.comm.allgather(time.perf_counter() - start))
    return calls[took[True] >= took[False]]


def _torch_exchange(setup: GpuTableSetup, nbytes: int, *, backend: str) -> Call:
    """torch.distributed's messages and a lerp: out of pinned memory on gloo, on the GPU by NCCL.

    Raises:
        Unavailable: The back-end does not run here.
    """
    group = _group(setup.world, backend)
    near = setup.schedule.neighbors(setup.world.rank, 0)
    (source, weight), target = next(iter(near.src_weights.items())), near.dst_ranks[0]
    own = setup.read(nbytes)
    come, out = torch.empty_like(own), torch.empty_like(own)
    staged = backend == "gloo"
    given, taken = (setup.device.host(nbytes) for _ in "io") if staged else (own, come)

    def work(number: int) -> torch.Tensor:
        if staged:
            given.copy_(own, non_blocking=True)
            setup.device.wait()
        send = distributed.P2POp(distributed.isend, given, target, group)
        receive = distributed.P2POp(distributed.irecv, taken, source, group)
        for request in distributed.batch_isend_irecv([send, receive]):
            request.wait()
        if staged:
            come.copy_(taken, non_blocking=True)
        return torch.lerp(own, come, weight, out=out)

    return setup.ended(work)


def _group(world: RankGroup, backend: str) -> Any:
    world.need_gloo()
    if backend == "gloo":
        return None
    if gpus() < world.size and "NCCL_HOSTID" not in os.environ:
        raise RivalUnavailableError(
            f"NCCL has a GPU for each of {world.size} ranks, or does not run; "
            "scripts/gpu --share hosts has ranks share one"
        )
    return distributed.new_group(backend=backend)


def own_gpus(world: RankGroup) -> bool:
    """Whether no ranks share a GPU: for what those cannot reach there is no aim."""
    return gpus() >= world.size or gpus() == 0


def mixing_table(setup: GpuTableSetup, transport: str, sizes: Sequence[int]) -> TimingTable:
    """``neighbor_allreduce`` over a transport, the limits beside it, and torch's own ways."""
    rivals = (
        Rival(transport, partial(_ours, setup)),
        Rival(f"{transport}, in place", partial(_ours, setup, in_place=True)),
        Rival(COPY, partial(_copy, setup), checked=False),
        Rival(OUT, partial(_pinned, setup, out=True), checked=False),
        Rival(IN, partial(_pinned, setup, out=False), checked=False),
        Rival(SLOWER, partial(_slower, setup), checked=False),
        Rival("gloo: pinned, messages + lerp", partial(_torch_exchange, setup, backend="gloo")),
        Rival("NCCL: messages + lerp", partial(_torch_exchange, setup, backend="nccl")),
    )
    large = (64 * MB, inf)
    staged = Target(
        transport,
        1.25,
        SLOWER,
        sizes=large,
        words="≥ 80% of the pinned copy's rate",
        told=lambda ratio: f"{1 / ratio:.0%}",
    )
    targets = {"cuda_ipc": Target(transport, 2, COPY, sizes=large), "cuda_staged": staged}
    return TimingTable(
        f"{transport}_{setup.world.size}",
        f"neighbor_allreduce by {transport}, one peer per call, {setup.world.size} ranks",
        sizes,
        rivals,
        targets=[targets[transport]] if transport in targets and own_gpus(setup.world) else [],
        compare=(transport, COPY),
        note="All ranks at once, each call until the device is through with it.",
        **setup.shared,
    )


def caller_table(setup: GpuTableSetup, transport: str, sizes: Sequence[int]) -> TimingTable:
    """Seconds until a non-blocking call returns; what it has begun ends off the clock."""
    name, start = f"{transport}, enqueue", bf.neighbor_allreduce_nonblocking

    def alone(nbytes: int) -> Call:
        own = setup.read(nbytes)
        return lambda number: start(own, name="alone", round=number)

    def finish(handle: bf.Handle[torch.Tensor]) -> torch.Tensor:
        result = handle.wait()
        setup.device.wait()
        return result

    return TimingTable(
        f"caller_{transport}_{setup.world.size}",
        f"neighbor_allreduce_nonblocking by {transport}, the caller's time, "
        f"{setup.world.size} ranks",
        sizes,
        (Rival(name, alone, finish=finish),),
        targets=[Target(name, seconds=30e-6)],
        compare=(),
        **setup.shared,
    )


def piece_table(setup: GpuTableSetup, sizes: Sequence[int]) -> TimingTable:
    """Build the table of staged averages with several piece sizes."""
    usual = cuda_staged._PIECE

    def pieces(megabytes: int, nbytes: int) -> Call:
        ours = _ours(setup, nbytes)

        def call(number: int) -> Any:
            cuda_staged._PIECE = megabytes * MB
            return ours(number)

        return call

    def end() -> None:
        cuda_staged._PIECE = usual

    return TimingTable(
        f"pieces_{setup.world.size}",
        f"neighbor_allreduce by cuda_staged, in pieces, {setup.world.size} ranks",
        sizes,
        [Rival(f"{size} MB", partial(pieces, size)) for size in _PIECES],
        end=end,
        compare=(),
        note=f"It takes pieces of {usual // MB} MB at present.",
        **setup.shared,
    )


def gpu_step_table(setup: GpuTableSetup, transport: str, workload: Workload) -> TimingTable:
    """A step of every method with one peer, each on a model of its own."""
    world = setup.world
    methods: dict[str, Method] = {LOCAL: lambda training: None}
    found = our_methods(world)
    methods |= {name: found[name] for name in (ATC, ATC_IN_BACKWARD, AWC, "gradient_allreduce")}
    aim = Target(
        (ATC, ATC_IN_BACKWARD),
        1.02,
        LOCAL,
        words="one-peer ATC: ≤ 2% over the local step",
        told=lambda ratio: f"{ratio - 1:.0%}",
    )
    return step_table(
        world,
        workload,
        methods,
        f"step_{transport}_{world.size}",
        f"a step of {workload.title}, by {transport}, {world.size} ranks",
        [aim] if own_gpus(world) else [],
        setup.ended,
        setup.device.place,
        f"{workload.nbytes / 4e6:.3g} million parameters in float32, SGD with momentum.",
    )
