"""Mistakes and absences on real ranks: what is raised where, told by each rank in one line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from asyncddp.integrations.torch_distributed import monitored_barrier

SHORT = timedelta(seconds=1)
RANK = int(os.environ.get("RANK", "0"))


def tell(what: str, call: Callable[[], object]) -> None:
    """Print what a call raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        found = f"returned {call()!r}"
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        found = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    sys.stdout.write(f"rank {RANK} {what} after {seconds:.0f} s: {found}\n")
    sys.stdout.flush()


def join(timeout: timedelta | None = None) -> None:
    dist.init_process_group("asyncddp", init_method="mpi://", timeout=timedelta(seconds=60))
    dist.barrier()
    if timeout is not None:
        dist.distributed_c10d._get_default_group().set_timeout(timeout)


def meet() -> None:
    """Let all ranks come to this point, through the store alone."""
    store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    number = store.add("meetings", 1)
    while store.add("meetings", 0) < -(-number // size) * size:
        time.sleep(0.01)


def absent_from_collective() -> None:
    """Rank 1 does not come: the others say so, and no later verb of the group runs."""
    join(SHORT)
    if RANK != 1:
        tell("collective", lambda: dist.all_reduce(torch.ones(4)))
        tell("next", dist.barrier)
    meet()
    dist.destroy_process_group()
    join()
    x = torch.ones(100_000)
    dist.all_reduce(x)
    tell("second init", lambda: x[0].item())


def other_shapes() -> None:
    """Rank 1 gives other elements: small ones, which slots carry, and large ones."""
    for count in (3, 300_000):
        join()
        tell(f"sum of {count}", lambda count=count: dist.all_reduce(torch.ones(count + RANK)))
        meet()
        dist.destroy_process_group()
    join()


def absent_from_queued_collective() -> None:
    join(SHORT)
    if RANK == 0:
        works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(2)]
        tell("first wait", works[0].wait)
        tell("second wait", works[1].wait)
        tell("value", works[0].get_future().value)
    meet()


def absent_from_message() -> None:
    join(SHORT)
    if RANK == 0:
        tell("recv", lambda: dist.recv(torch.zeros(1), src=1))
    meet()


def absent_from_barrier() -> None:
    join()
    if RANK != 1:
        tell("barrier", lambda: monitored_barrier(timeout=SHORT))
    meet()
    tell("later", dist.barrier)
    meet()
    if RANK == 0:
        tell("all named", lambda: monitored_barrier(timeout=SHORT, wait_all_ranks=True))
    meet()


def absent_from_new_group() -> None:
    join(SHORT)
    ranks = list(range(dist.get_world_size()))
    if RANK == 0:
        tell("group", lambda: dist.new_group(ranks, timeout=SHORT, use_local_synchronization=True))
    meet()


def bad_arguments() -> None:
    join()
    meta, sparse = torch.ones(2, device="meta"), torch.eye(2).to_sparse()
    tell("device", lambda: dist.all_reduce(meta))
    tell("layout", lambda: dist.all_reduce(sparse))
    tell("tag", lambda: dist.send(torch.ones(1), dst=1 - RANK, tag=40_000))
    tell("operator", lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))
    tell("dtype", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)))
    tell("count", lambda: dist.all_gather([torch.ones(1)], torch.ones(1)))
    x = torch.ones(2)
    dist.all_reduce(x)
    tell("still works", lambda: x.tolist())


def other_world_size() -> None:
    tell(
        "world size",
        lambda: dist.init_process_group("asyncddp", init_method="mpi://", world_size=7, rank=RANK),
    )
    os.environ["WORLD_SIZE"] = "1"
    tell("environment", lambda: dist.init_process_group("asyncddp", timeout=SHORT))


def misspelt_backend() -> None:
    tell("backend", lambda: dist.init_process_group("asyncdp", init_method="mpi://"))


def mixed_backends() -> None:
    for mixture in ("cpu:asyncddp,cuda:nope", "cpu:gloo,meta:asyncddp"):
        tell(mixture, partial(dist.init_process_group, mixture, init_method="mpi://"))


def group_beside_gloo() -> None:
    """The default group is gloo's: a first group of all ranks, and then of some."""
    dist.init_process_group("gloo", init_method="mpi://")
    mine = [[0, 1], [2]][RANK // 2]
    tell("part", lambda: dist.new_group([0, 1], backend="asyncddp"))
    every = dist.new_group(backend="asyncddp")
    x, y = torch.ones(3), torch.ones(3)
    dist.all_reduce(x, group=every)
    part = dist.new_group(mine, backend="asyncddp", use_local_synchronization=True)
    dist.all_reduce(y, group=part)
    tell("sums", lambda: [x[0].item(), y[0].item()])


def main(name: str) -> None:
    globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
