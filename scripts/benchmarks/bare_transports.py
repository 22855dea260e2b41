"""Benchmark tables of bare transports: messages and sums of MPI, and of sockets without it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import distributed

from asyncddp.transport import TRANSPORTS, Transport
from asyncddp.transport.sockets.rendezvous import meet
from asyncddp.transport.sockets.socket_transport import MeshGroup, SocketTransport
from asyncddp.transport.startup_deadline import StartupDeadline
from benchmarks import baselines
from benchmarks.baselines import FILL, rival
from benchmarks.tables import Call, RankGroup, Rival, TimingTable

_SECONDS = 60.0
_TAG = 1
Body = Callable[[Transport, torch.Tensor, torch.Tensor, int], torch.Tensor]


@lru_cache
def _mpi() -> Transport:
    return TRANSPORTS["mpi"]()


@lru_cache
def _sockets() -> Transport:
    """The transport of torchrun's ranks, without the memory that they share inside a machine."""
    mesh = meet(StartupDeadline.for_single_process())
    atexit.register(mesh.close)
    return SocketTransport(MeshGroup(mesh, "benchmark", range(mesh.size)))


def _over_transports(world: RankGroup, body: Body) -> list[Rival]:
    """Return a rival for each transport; they are opened when the first is prepared."""

    def over(transport: Callable[[], Transport]) -> Callable[[int], Call]:
        def prepare(nbytes: int) -> Call:
            own = baselines.own(nbytes, world.rank)
            return partial(body, transport(), own, torch.empty_like(own))

        return prepare

    transports = {"mpi": _mpi, "c10d: sockets": _sockets}
    return [Rival(name, over(transport)) for name, transport in transports.items()]


def exchange_table(world: RankGroup, sizes: Sequence[int]) -> TimingTable:
    """Send to the next rank and receive from the one before, by the transport's own messages."""
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def exchange(
        used: Transport, own: torch.Tensor, out: torch.Tensor, number: int
    ) -> torch.Tensor:
        sending = used.isend(own, ahead, _TAG)
        used.receive(out, behind, _TAG, _SECONDS)
        used.finish(sending, _SECONDS, "send")
        return out

    def gloo(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
        sending = distributed.isend(own, ahead)
        distributed.recv(out, behind)
        assert sending is not None
        sending.wait()
        return out

    title = "bare transports: a message to the next rank, one from the rank before"
    rivals = [
        *_over_transports(world, exchange),
        rival(world, "gloo: isend, recv", gloo, FILL, gloo=True),
    ]
    expected = partial(baselines.tensor, rank=behind)
    return TimingTable("transport_exchange", title, sizes, rivals, expected=expected)


def sum_table(world: RankGroup, sizes: Sequence[int]) -> TimingTable:
    """Sum over all ranks, by the transport's own collective."""

    def add(used: Transport, own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
        used.finish(used.iallreduce(own, out), _SECONDS, "allreduce")
        return out

    def gloo(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
        distributed.all_reduce(out.copy_(own))
        return out

    rivals = [
        *_over_transports(world, add),
        rival(world, "gloo: copy, all_reduce", gloo, FILL, gloo=True),
    ]
    return TimingTable(
        "transport_sum",
        "bare transports: a sum over all ranks",
        sizes,
        rivals,
        expected=lambda nbytes: baselines.mean_of_all(world, nbytes) * world.size,
    )
