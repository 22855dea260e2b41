"""One-sided means one-sided: what a rank does with windows does not wait for what others do."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import PATIENCE, FileEvent, on

WORLDS = ("loopback-2", "mpi-2", "shared_memory-2")
SHAPES = {"small": (23,), "large": (1_000_000,)}


def sleep(through):
    """Do nothing until another rank is through."""
    through.wait()


def compute(through):
    """Torch and Python, without a call of the library, until another rank is through."""
    a, end = torch.ones(100, 100), time.monotonic() + PATIENCE
    while not through.is_set():
        assert time.monotonic() < end, "the other rank waits for this one"
        a = (a @ a).clamp(-1, 1)
        sum(range(1000))


WORK = {"sleep": sleep, "compute": compute}


def writes_to_a_busy_rank(work, folder):
    """Rank 1 is busy until rank 0 is through with all that it wants of it."""
    r, through = bf.rank(), FileEvent(folder / "through")
    bf.set_topology(topology.complete(2))
    windows = {name: torch.full(shape, float(r + 1)) for name, shape in SHAPES.items()}
    for name, x in windows.items():
        bf.win_create(x, name, zero_init=True)
    bf.barrier()
    if r == 1:
        WORK[work](through)
        for name, x in windows.items():
            bf.win_update(name, 1.0, {0: 1.0})
            assert (x == 2 + 5 + 6).all(), x
        bf.barrier()
        return
    for name, x in windows.items():
        bf.win_put(torch.full_like(x, 5.0), name)
        bf.win_accumulate(torch.full_like(x, 6.0), name, require_mutex=True)
        bf.win_get(name)
        bf.win_update(name, 1.0, {1: 1.0}, require_mutex=True)
        assert (x == 1 + 2).all(), x
    through.set()
    bf.barrier()


@on(*WORLDS)
@pytest.mark.parametrize("work", WORK)
def test_a_busy_rank_is_written_to_and_read(world, tmp_path, work):
    """What was put is there at its next update; in BlueFog the put took as long as the sleep."""
    world.run(writes_to_a_busy_rank, work, tmp_path)


def steps_beside_a_straggler(folder):
    """Three ranks step as fast as they can; rank 3 stops until they are through."""
    through = FileEvent(folder / "through")
    bf.set_topology(topology.ring(bf.size()))
    x = torch.full((1000,), float(bf.rank()))
    bf.win_create(x, "x")
    bf.barrier()
    for step in range(50):
        if (bf.rank(), step) == (3, 2):
            through.wait_for(range(3))
        bf.win_put_nonblocking(x, "x")
        bf.win_update("x")
    through.of(bf.rank()).set()
    bf.barrier()


@on("loopback-4", "mpi-4", "shared_memory-4")
def test_a_straggler_stops_nobody(world, tmp_path):
    """Fifty puts and updates complete on three ranks while their neighbour stands still."""
    world.run(steps_beside_a_straggler, tmp_path)


def two_threads(rounds):
    """One thread of each rank puts and accumulates, another one updates, both as they like."""
    from asyncddp.context.context import use

    bf.set_topology(topology.complete(bf.size()))
    x = torch.zeros(500, dtype=torch.float64)
    bf.win_create(x, "x", zero_init=True)
    bf.barrier()
    context, errors = bf.current(), []

    def write():
        with use(context):
            try:
                handles = [
                    bf.win_accumulate_nonblocking(torch.ones(500, dtype=torch.float64), "x")
                    for _ in range(rounds)
                ]
                for handle in handles:
                    handle.wait()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        bf.win_update_then_collect("x")
    writer.join()
    assert not errors, errors
    bf.barrier()
    bf.win_update_then_collect("x")
    assert (x == rounds * (bf.size() - 1)).all(), x[0]
    bf.barrier()


@on(*WORLDS)
def test_threads_of_one_rank_share_a_window(world):
    """Every value that was accumulated is collected exactly once."""
    world.run(two_threads, 300)
