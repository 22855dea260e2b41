"""Benchmark tables of bare transports: messages and sums of MPI, and of sockets without it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from asyncddp.transport import TRANSPORTS, Transport
from asyncddp.transport.c10d.c10d_transport import C10dTransport, MeshGroup
from asyncddp.transport.c10d.rendezvous import meet
from asyncddp.transport.startup_deadline import StartupDeadline
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, TimingTable

__all__ = ["exchange_table", "sum_table"]

_SECONDS = 60.0
_TAG = 1


@lru_cache
def _mpi() -> Transport:
    return TRANSPORTS["mpi"]()


@lru_cache
def _sockets() -> Transport:
    """The transport of torchrun's ranks, without the memory that they share inside a machine."""
    mesh = meet(StartupDeadline.for_single_process())
    atexit.register(mesh.close)
    return C10dTransport(MeshGroup(mesh, "benchmark", range(mesh.size)))


_RIVALS = {"mpi": _mpi, "c10d: sockets": _sockets}


def exchange_table(world: RankGroup, sizes: Sequence[int]) -> TimingTable:
    """Send to the next rank and receive from the one before, by the transport's own messages."""
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def over(transport: Callable[[], Transport]) -> Callable[[int], Call]:
        def prepare(nbytes: int) -> Call:
            own = baselines.own(nbytes, world.rank)
            out, used = torch.empty_like(own), transport()

            def call(number: int) -> torch.Tensor:
                sending = used.isend(own, ahead, _TAG)
                used.receive(out, behind, _TAG, _SECONDS)
                used.finish(sending, _SECONDS, "send")
                return out

            return call

        return prepare

    def gloo(nbytes: int) -> Call:
        own = _gloo_input(world, nbytes)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            sending = torch.distributed.isend(own, ahead)
            torch.distributed.recv(out, behind)
            assert sending is not None
            sending.wait()
            return out

        return call

    return TimingTable(
        "transport_exchange",
        "bare transports: a message to the next rank, one from the rank before",
        sizes,
        (
            *(Rival(name, over(transport)) for name, transport in _RIVALS.items()),
            Rival("gloo: isend, recv", gloo),
        ),
        expected=lambda nbytes: baselines.tensor(nbytes, behind),
    )


def sum_table(world: RankGroup, sizes: Sequence[int]) -> TimingTable:
    """Sum over all ranks, by the transport's own collective."""

    def over(transport: Callable[[], Transport]) -> Callable[[int], Call]:
        def prepare(nbytes: int) -> Call:
            own = baselines.own(nbytes, world.rank)
            out, used = torch.empty_like(own), transport()

            def call(number: int) -> torch.Tensor:
                used.finish(used.iallreduce(own, out), _SECONDS, "allreduce")
                return out

            return call

        return prepare

    def gloo(nbytes: int) -> Call:
        own = _gloo_input(world, nbytes)
        out = torch.empty_like(own)

        def call(number: int) -> torch.Tensor:
            torch.distributed.all_reduce(out.copy_(own))
            return out

        return call

    factor = world.size * (world.size + 1) / 2
    return TimingTable(
        "transport_sum",
        "bare transports: a sum over all ranks",
        sizes,
        (
            *(Rival(name, over(transport)) for name, transport in _RIVALS.items()),
            Rival("gloo: copy, all_reduce", gloo),
        ),
        expected=lambda nbytes: baselines.tensor(nbytes, 0) * factor,
    )


def _gloo_input(world: RankGroup, nbytes: int) -> torch.Tensor:
    if world.gloo is not None:
        raise RivalUnavailableError(world.gloo)
    return baselines.own(nbytes, world.rank)
