"""Baselines by hand: neighbour exchanges with mpi4py and gloo, set up beside asyncddp."""

from __future__ import annotations

import atexit
import datetime
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp.topology import Neighbors, Schedule
from benchmarks.tables import Call, RankGroup, Rival

_PORT = 29500  # nobody else lives on the hosts that a bench makes

Exchange = Callable[[Neighbors, torch.Tensor, list[torch.Tensor]], None]
"""Sends the own tensor to the neighbours and receives theirs into the list."""


def join(interface: str | None = None) -> RankGroup:
    """Set up MPI and gloo on the ranks that are running; asyncddp has initialised MPI before.

    Args:
        interface: Of gloo between hosts, which meet over TCP at rank 0's; None for one machine.
    """
    comm = MPI.COMM_WORLD.Dup()
    reasons = comm.allgather(_join_gloo(comm, interface))
    return RankGroup(comm, next((reason for reason in reasons if reason is not None), None))


def _join_gloo(comm: MPI.Intracomm, interface: str | None) -> str | None:
    """Start gloo, met over TCP between hosts and in a file on one; why not, where that fails."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this torch was built without gloo"
    if interface is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = None
        if comm.rank == 0:
            folder = tempfile.mkdtemp(prefix="bench-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        meeting = (Path(comm.bcast(folder)) / "store").as_uri()
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        meeting = f"tcp://{comm.bcast(os.uname().nodename)}:{_PORT}"
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=meeting,
            rank=comm.rank,
            world_size=comm.size,
            timeout=datetime.timedelta(seconds=60 if interface is None else 120),
        )
    except (RuntimeError, ValueError) as error:
        return f"gloo does not start: {str(error).splitlines()[0]}"
    return None


def tensor(nbytes: int, rank: int) -> torch.Tensor:
    """Create rank r's input: the same noise on all ranks, times r + 1."""
    return _noise(nbytes) * (rank + 1)


@lru_cache(maxsize=1)  # the largest take longer to make than to send
def _noise(nbytes: int) -> torch.Tensor:
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(nbytes))


@lru_cache(maxsize=1)
def own(nbytes: int, rank: int) -> torch.Tensor:
    """Return rank r's input, shared by the rivals that only read it."""
    return tensor(nbytes, rank)


def mean_of_all(world: RankGroup, nbytes: int) -> torch.Tensor:
    """Compute the average of all ranks' inputs."""
    return tensor(nbytes, 0) * ((world.size + 1) / 2)


READ, FILL, CHANGE = ("own",), ("own", "out"), ("copy",)
"""Memory of a rival that only reads the input, that writes its result elsewhere, or into it."""
SCATTER, GATHER = ("all own", "out"), ("own", "all out")
"""The same where the input, or the result, is as large as all ranks' parts together."""


def rival(
    world: RankGroup,
    name: str,
    body: Callable[..., Any],
    memory: Sequence[str] = READ,
    *,
    gloo: bool = False,
    **options: Any,
) -> Rival:
    """Return a rival that calls ``body(*memory, number)``.

    Args:
        world: The ranks.
        name: As it stands over its column.
        body: The work, once.
        memory: Names of the tensors that are made for it, which are kept from call to call.
        gloo: Whether it needs gloo.
        options: Of :class:`Rival`.
    """

    def prepare(nbytes: int) -> Call:
        if gloo:
            world.need_gloo()
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "own": lambda: own(nbytes, world.rank),
            "out": lambda: torch.empty(nbytes // 4),
            "copy": lambda: tensor(nbytes, world.rank),
            "all own": lambda: own(nbytes * world.size, world.rank),
            "all out": lambda: torch.empty(world.size * (nbytes // 4)),
        }
        return partial(body, *(makers[kind]() for kind in memory))

    return Rival(name, prepare, **options)


def average(schedule: Schedule, rank: int, nbytes: int) -> torch.Tensor:
    """Compute rank r's expected result after round 0 of the schedule."""
    near = schedule.neighbors(rank, 0)
    total = near.self_weight * tensor(nbytes, rank)
    for peer, weight in near.src_weights.items():
        total.add_(tensor(nbytes, peer), alpha=weight)
    return total


def combine(
    near: Neighbors, mine: torch.Tensor, others: list[torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    """The weighted average into ``out``; with one neighbour a single pass over the memory."""
    weights = list(near.src_weights.values())
    if len(others) == 1:
        return torch.lerp(mine, others[0], weights[0], out=out)
    torch.mul(mine, near.self_weight, out=out)
    for other, weight in zip(others, weights, strict=True):
        out.add_(other, alpha=weight)
    return out


def mixer(world: RankGroup, schedule: Schedule, nbytes: int, exchange: Exchange) -> Call:
    """Exchange with the neighbours of the round by ``exchange``, then combine."""
    period = schedule.period or 1
    rounds = [schedule.neighbors(world.rank, k) for k in range(period)]
    mine = own(nbytes, world.rank)
    out = torch.empty_like(mine)
    others = [tensor(nbytes, peer) for peer in rounds[0].src_weights]  # what the limit needs
    most = max(len(near.src_weights) for near in rounds)
    others += [torch.ones_like(mine) for _ in range(most - len(others))]

    def call(number: int) -> torch.Tensor:
        near = rounds[number % period]
        received = others[: len(near.src_weights)]
        exchange(near, mine, received)
        return combine(near, mine, received, out)

    return call


def mpi_exchange(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """mpi4py: ``Sendrecv`` with one neighbour, ``Isend`` and ``Irecv`` with several."""
    comm = world.comm

    def exchange(near: Neighbors, mine: torch.Tensor, others: list[torch.Tensor]) -> None:
        if len(others) == 1 and len(near.dst_ranks) == 1:
            source = next(iter(near.src_weights))
            comm.Sendrecv(mine.numpy(), near.dst_ranks[0], recvbuf=others[0].numpy(), source=source)
            return
        sources = zip(near.src_weights, others, strict=True)
        requests = [comm.Irecv(other.numpy(), source) for source, other in sources]
        requests += [comm.Isend(mine.numpy(), peer) for peer in near.dst_ranks]
        MPI.Request.Waitall(requests)

    return mixer(world, schedule, nbytes, exchange)


def gloo_exchange(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """torch.distributed on gloo: ``batch_isend_irecv``.

    Raises:
        Unavailable: gloo does not run here.
    """
    world.need_gloo()
    from torch import distributed

    def exchange(near: Neighbors, mine: torch.Tensor, others: list[torch.Tensor]) -> None:
        send, receive = distributed.isend, distributed.irecv
        batch = [distributed.P2POp(send, mine, peer) for peer in near.dst_ranks]
        for source, other in zip(near.src_weights, others, strict=True):
            batch.append(distributed.P2POp(receive, other, source))
        for work in distributed.batch_isend_irecv(batch):
            work.wait()

    return mixer(world, schedule, nbytes, exchange)


def over(world: RankGroup, schedule: Schedule) -> dict[str, Any]:
    """Return what tables of averages over a schedule share: their beginning and their result."""
    return {
        "expected": partial(average, schedule, world.rank),
        "begin": lambda: bf.set_topology(schedule),
    }


def local_mix(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """Average local buffers without communication: the limit."""
    return mixer(world, schedule, nbytes, lambda near, mine, others: None)
