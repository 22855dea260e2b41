"""Memory that ranks share has a bound, whatever sizes come and go: bytes and open files."""

from __future__ import annotations

import random
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import asyncddp as bf
from tests.support import on, run_on_mpirun


def resident():
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def few_files(number):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def windows_of_changing_sizes():
    """How much a process grows by windows that come and go: 4 MiB each where none is used again."""
    sizes, before = random.Random(0), 0
    for cycle in range(80):
        if cycle == 10:
            before = resident()
        count = sizes.randrange(1_000, 500_000)
        bf.win_create(torch.zeros(count), "x")
        bf.win_put(torch.ones(count), "x")
        bf.barrier()
        bf.win_update("x")
        bf.barrier()
        bf.win_free("x")
    return (resident() - before) >> 20


def tensors_of_changing_sizes():
    """Whether tensors of 500 sizes, each freed at once, were all shared, with at most 256 files."""
    arena = bf.current().transport.shared_memory_group.arena
    with few_files(256):
        found = all(
            arena.locate(bf.empty_shared((1024 * size,)).fill_(1.0)) is not None
            for size in range(1, 501)
        )
        held = [bf.empty_shared((1024,)) for _ in range(500)]
        return found and all(arena.locate(one) is not None for one in held)


def peak_growth(call):
    """Bytes by which this process grows while a call is under way."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()
    call()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before


def sums_of_bytes():
    """By how many MiB sums and means of 64 MiB of small integers make a process grow."""
    x = torch.ones(64 << 20, dtype=torch.uint8)
    for verb in (bf.allreduce_, bf.reduce_scatter):
        verb(torch.ones(64 << 20), average=False)  # so that what all sums share is there
    part = torch.ones(len(x) // bf.size(), dtype=x.dtype)
    calls = [
        lambda: bf.allreduce_(x, average=False),
        lambda: bf.allreduce_(x, round_integers=True),
        lambda: bf.reduce_scatter(x, average=False, out=part),
        lambda: bf.reduce_scatter(x, round_integers=True, out=part),
    ]
    return [peak_growth(call) >> 20 for call in calls]


@pytest.mark.nightly
@on("shared_memory-4")
def test_integers_are_summed_in_pieces(world):
    """Not in a wider copy of the whole tensor, which would take four or eight times as much."""
    for grown in world.run(sums_of_bytes):
        assert max(grown) < 32, grown


@on("shared_memory-4")
def test_windows_of_changing_sizes_use_memory_again(world):
    """After ten windows, seventy more of other sizes add less than 64 MiB to a process."""
    assert max(world.run(windows_of_changing_sizes)) < 64


@on("shared_memory-2")
def test_shared_tensors_of_many_sizes_need_few_files(world):
    """A limit of 256 open files is enough for 500 sizes and for 500 tensors held at once."""
    assert world.run(tensors_of_changing_sizes) == [True] * 2


CYCLES = """
import ctypes, resource
from pathlib import Path
import torch, asyncddp as bf
from mpi4py import MPI

def next_communicator():
    # its number among those of this process, which uses the lowest free one
    found = MPI.COMM_WORLD.Dup()
    number = found.py2f()
    found.Free()
    return number

def resident():
    # without what is free already: the C library keeps pieces that fit no later aligned request
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10

def cycle():
    bf.init()
    mean = (bf.size() - 1) / 2
    found = bf.allreduce(torch.full((1 << 18,), float(bf.rank())))
    assert found.unique().tolist() == [mean], found.unique()
    bf.neighbor_allreduce(torch.ones(1 << 18), name="x")
    assert bf.local_allreduce(torch.full((9,), float(bf.rank()))).unique().tolist() == [mean]
    bf.win_create(torch.zeros(1 << 16), "x")
    bf.win_put(torch.ones(1 << 16), "x")
    bf.barrier()
    bf.win_update("x")
    rank = bf.rank()
    bf.shutdown()
    return rank

for _ in range(CYCLES // 2):
    cycle()
before, first = resident(), next_communicator()
for _ in range(CYCLES):
    rank = cycle()
grown, new = resident() - before, next_communicator() - first
print(f"rank {rank} has {new} more communicators and grew by {grown} KiB", flush=True)
"""


def growth(ranks, cycles, folder):
    """MiB by which all ranks together have grown, none of which has more communicators."""
    done = run_on_mpirun(ranks, CYCLES.replace("CYCLES", str(cycles)), folder)
    assert done.code == 0, done
    grown = [int(line.split()[-2]) for line in done.stdout.splitlines() if "grew by" in line]
    assert len(grown) == done.stdout.count("has 0 more communicators") == ranks, done
    return sum(grown) >> 10


@pytest.mark.nightly
def test_worlds_that_come_and_go_use_communicators_and_memory_again(tmp_path):
    """Processes with new ones for each world would grow by 1 MiB in each of 32 cycles."""
    assert growth(2, 32, tmp_path) < 2 * 24


@pytest.mark.soak
def test_a_hundred_worlds_that_come_and_go_use_memory_again(tmp_path):
    """The same on four ranks: 100 MiB each are looked for, and up to 50 come and go."""
    assert growth(4, 100, tmp_path) < 4 * 60
