"""Work of ``scale`` on more ranks than cores: they start, MPI first, then they average."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
import torch

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # started on the clock, ended at exit
from mpi4py import MPI  # noqa: E402

import asyncddp as bf  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.tables import Call, RankGroup, TimingTable

_SAMPLE = 0.1  # seconds of a rival's turn
_NBYTES = 4096
Array = np.ndarray[Any, np.dtype[np.float32]]


def measure_ranks(ranks: int, rounds: int, folder: str) -> dict[str, Any]:
    """Start, then let rivals take turns.

    Args:
        ranks: How many there are.
        rounds: Of each rival.
        folder: In which ranks tell each other that they have loaded torch and mpi4py, which is not
            compared.
    """
    torch.set_num_threads(1)
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < ranks:
        time.sleep(0.02)
    start = _start()
    from benchmarks.harness import measure  # these load asyncddp
    from benchmarks.machine_info import facts_of_run
    from benchmarks.tables import RankGroup

    world = RankGroup(MPI.COMM_WORLD.Dup(), "not compared here")
    rows = [
        (row.table, row.rival, row.seconds)
        for table in _tables(world)
        for row in measure(world, table, rounds=rounds, sample=_SAMPLE)[0]
    ]
    return {"start": start, "rows": rows, "header": facts_of_run()}


def _start() -> list[float]:
    """Seconds until all ranks have started MPI and met, loaded asyncddp, and started it."""
    moments = [time.monotonic()]
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    MPI.COMM_WORLD.Barrier()
    moments.append(time.monotonic())
    init = bf.init  # loaded on first use
    moments.append(time.monotonic())
    init()
    moments.append(time.monotonic())
    begun, *ended = zip(*MPI.COMM_WORLD.allgather(moments), strict=True)
    ends = [min(begun), *map(max, ended)]
    return [end - before for before, end in pairwise(ends)]


def _tables(world: RankGroup) -> list[TimingTable]:
    """Both averages, by asyncddp and by mpi4py: in memory that is there, and in a function."""
    from asyncddp import topology
    from benchmarks.baselines import own, rival
    from benchmarks.mixing import MPI4PY, OURS, mixing_table
    from benchmarks.ops import MPI_SUM, allreduce_table
    from benchmarks.tables import Rival

    comm, size = world.comm, world.size
    one_peer = topology.as_schedule(topology.one_peer_exponential(size))
    near = [one_peer.neighbors(world.rank, k) for k in range(one_peer.period or 1)]
    peers = [(one.dst_ranks[0], *next(iter(one.src_weights.items()))) for one in near]

    def average_arrays(own: Array, out: Array, number: int) -> None:
        target, source, weight = peers[number % len(peers)]
        comm.Sendrecv(own, target, recvbuf=out, source=source)
        np.subtract(out, own, out)
        np.multiply(out, weight, out)
        np.add(out, own, out)

    def average(own: torch.Tensor, number: int) -> torch.Tensor:
        """The least that an average does that takes a tensor and returns another."""
        _check(own)
        out = torch.empty_like(own)
        target, source, weight = peers[number % len(peers)]
        comm.Sendrecv(own.numpy(), target, recvbuf=out.numpy(), source=source)
        return torch.lerp(own, out, weight, out=out)

    def sum_arrays(own: Array, out: Array, number: int) -> None:
        comm.Allreduce(own, out, MPI.SUM)
        np.divide(out, size, out)

    def add(own: torch.Tensor, number: int) -> torch.Tensor:
        """The least that an allreduce does that takes a tensor and returns another."""
        _check(own)
        out = torch.empty_like(own)
        comm.Allreduce(own.numpy(), out.numpy(), MPI.SUM)
        return out.div_(size)

    def on_arrays(body: Callable[[Array, Array, int], None], nbytes: int) -> Call:
        """A call without torch, in memory that is there."""
        array = own(nbytes, world.rank).numpy()
        out = np.empty_like(array)
        result = torch.from_numpy(out)

        def call(number: int) -> torch.Tensor:
            body(array, out, number)
            return result

        return call

    def beside(
        table: TimingTable, arrays: Callable[[Array, Array, int], None], function: Any
    ) -> TimingTable:
        compared = [one for one in table.rivals if one.name in (OURS, MPI4PY, MPI_SUM)]
        by_hand = [
            Rival("mpi4py on numpy's arrays", partial(on_arrays, arrays)),
            rival(world, "mpi4py in a function of tensors", function),
        ]
        return replace(table, rivals=[*compared, *by_hand])

    averages = mixing_table(world, "one-peer average", "", one_peer, (_NBYTES,))
    sums = allreduce_table(world, one_peer, (_NBYTES,))
    return [beside(averages, average_arrays, average), beside(sums, sum_arrays, add)]


def _check(tensor: torch.Tensor) -> None:
    """Ask whether a tensor's memory can be sent as it is, as any library must."""
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor on the host, without gradient")
