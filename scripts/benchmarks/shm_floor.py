"""Floor of an average with one peer: a copy into shared memory, two hand-overs, and the lerp."""

from __future__ import annotations

import mmap
import os
from itertools import count

import torch

from asyncddp.topology import Schedule
from benchmarks.baselines import own
from benchmarks.tables import Call, RankGroup, RivalUnavailableError

FLOOR = "floor: copy + lerp"
_SPINS = 1000  # before a rank that waits leaves its core to others
_LINE = 8  # words of a cache line, of which each rank has one


def _mapped(world: RankGroup, nbytes: int) -> mmap.mmap:
    """Map memory that all ranks of this machine share.

    Raises:
        RivalUnavailableError: This rank cannot map it.
    """
    path, descriptor = None, None
    if world.rank == 0:
        descriptor = os.memfd_create("bench-floor")
        os.ftruncate(descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        with open(world.comm.bcast(path), "r+b") as file:  # noqa: PTH123 (rank 0's, by its number)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as problem:
        raise RivalUnavailableError(f"ranks share no memory: {problem.strerror}") from problem
    finally:
        world.comm.Barrier()
        if descriptor is not None:
            os.close(descriptor)


def prepare(world: RankGroup, schedule: Schedule, nbytes: int) -> Call:
    """Return a call in which each rank publishes its tensor, and averages with the peer's copy.

    Raises:
        RivalUnavailableError: The ranks share no memory.
    """
    rank, n = world.rank, nbytes // 4
    head = 8 * _LINE * world.size
    memory = _mapped(world, head + world.size * nbytes)
    turns_of = memoryview(memory)[:head].cast("q")
    copies = torch.frombuffer(memory, dtype=torch.float32, offset=head).view(world.size, n)
    near = [schedule.neighbors(rank, k) for k in range(schedule.period or 1)]
    peers = [(*next(iter(one.src_weights.items())), one.dst_ranks[0]) for one in near]
    mine, out, turns = own(nbytes, rank), torch.empty(n), count(1)

    def hand_over(peer: int) -> None:
        turn = turns_of[_LINE * rank] = next(turns)
        spins = 0
        while turns_of[_LINE * peer] < turn:
            spins += 1
            if spins > _SPINS:
                os.sched_yield()

    def call(number: int) -> torch.Tensor:
        source, weight, target = peers[number % len(peers)]
        copies[rank].copy_(mine)
        hand_over(source)
        torch.lerp(mine, copies[source], weight, out=out)
        hand_over(target)
        return out

    return call
