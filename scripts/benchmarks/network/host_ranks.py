"""What programs on hosts of their own share: their ranks, quiet between turns, bytes sent."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import torch
from mpi4py import MPI

from benchmarks.tables import RankGroup

__all__ = ["join_hosts", "transmitted", "wait_until_quiet"]

_PORT = 29500  # nobody else lives on these hosts
_TIMEOUT = datetime.timedelta(seconds=120)


def join_hosts(interface: str) -> RankGroup:
    """MPI and, over the same interface, gloo, met over TCP at rank 0's host."""
    comm = MPI.COMM_WORLD.Dup()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    first = comm.bcast(os.uname().nodename)
    why = None
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{first}:{_PORT}",
            rank=comm.rank,
            world_size=comm.size,
            timeout=_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        why = f"gloo does not start: {str(error).splitlines()[0]}"
    reasons = comm.allgather(why)
    return RankGroup(comm, next((reason for reason in reasons if reason is not None), None))


def wait_until_quiet(world: RankGroup) -> None:
    """Wait until nothing is under way between the ranks any more, and leave the cores alone."""
    for _ in range(2):
        gathered = world.comm.Ibarrier()
        while not gathered.Test():
            time.sleep(0.0005)
    time.sleep(0.05)


def transmitted(interface: str) -> int:
    """Bytes that this host has sent through an interface, since it was made."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text(encoding="ascii"))
