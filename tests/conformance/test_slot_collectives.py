"""Collectives through slots of shared memory: late ranks, threads, other sizes, failures."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import PeerError
from tests.support import World, on

SHARED = on("shared_memory-2", "shared_memory-4")
LATE = 0.3  # seconds: the engine has taken over by then


def uses_slots() -> bool:
    return bf.current().transport.collective_slots is not None


@SHARED
def test_ranks_of_one_machine_have_slots(world: World) -> None:
    """Else nothing below would be tested."""
    assert all(world.run(uses_slots))


def late_ranks() -> None:
    rank, ranks = bf.rank(), bf.size()
    for late in range(ranks):
        if rank == late:
            time.sleep(LATE)
        assert bf.allreduce(torch.tensor([float(rank)]), average=False).item() == sum(range(ranks))
        if rank == late:
            time.sleep(LATE)
        assert bf.allgather_object(rank) == list(range(ranks))
        if rank == late:
            time.sleep(LATE)
        bf.barrier()


@SHARED
def test_the_engine_takes_over_where_a_rank_is_late(world: World) -> None:
    """Whoever it is."""
    world.run(late_ranks)


def ahead() -> list[float]:
    if bf.rank() != 0:
        time.sleep(LATE)
    found = [bf.broadcast(torch.full((3,), float(bf.rank() + n)), 0)[0].item() for n in range(20)]
    handles = [bf.broadcast_nonblocking(torch.full((3,), float(n)), 0) for n in range(20)]
    return found + [handle.wait()[0].item() for handle in handles]


@SHARED
def test_a_root_that_is_ahead_overwrites_nothing(world: World) -> None:
    """Slots are used again once all have read them."""
    for found in world.run(ahead):
        assert found == [float(n) for n in range(20)] * 2


def one_blocking_one_not() -> None:
    for step in range(50):
        x = torch.tensor([bf.rank() + step])
        if (bf.rank() + step) % 2:
            total = bf.allreduce(x, average=False)
        else:
            total = bf.allreduce_nonblocking(x, average=False).wait()
        assert total.item() == sum(rank + step for rank in range(bf.size()))


@SHARED
def test_a_blocking_and_a_nonblocking_call_meet(world: World) -> None:
    """One on the calling thread, one by the engine."""
    world.run(one_blocking_one_not)


def unequal_rows() -> None:
    rank, ranks = bf.rank(), bf.size()
    for big in (1, 100_000):  # of which one fits into slots, and the other does not
        rows = torch.full((big if rank == 0 else 2, 2), float(rank))
        found = bf.allgather(rows)
        assert found.shape == (big + 2 * (ranks - 1), 2)
        assert found[-1].tolist() == [ranks - 1.0] * 2
        assert found[0].tolist() == [0.0, 0.0]
    long = "x" * 200_000 if rank == 0 else "y"
    assert bf.allgather_object(long)[:2] == ["x" * 200_000, "y"]
    assert bf.broadcast_object(long, 0) == "x" * 200_000


@SHARED
def test_ranks_of_which_one_gives_more_than_slots_hold(world: World) -> None:
    """All go the way of messages then."""
    world.run(unequal_rows)


def many_threads() -> list[str]:
    problems: list[str] = []

    def call() -> None:
        try:
            for _ in range(30):
                total = bf.allreduce(torch.ones(8), average=False)
                if total[0].item() != bf.size():
                    problems.append(f"got {total}")
        except Exception as error:  # noqa: BLE001 - told by the test
            problems.append(repr(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return problems


@SHARED
def test_threads_call_collectives_at_once(world: World) -> None:
    """Of one kind, since the order of different ones would differ between ranks."""
    assert not any(world.run(many_threads))


def different(kind: int) -> None:
    if bf.rank() == bf.size() - 1:
        time.sleep(LATE * (kind % 2))  # the others wait on their threads, or by the engine
        bf.allreduce(torch.ones(2))
    else:
        bf.allreduce(torch.ones(3)) if kind < 2 else bf.barrier()


@SHARED
@pytest.mark.parametrize("kind", range(4))
def test_ranks_that_call_different_collectives_are_told(world: World, kind: int) -> None:
    """Both signatures are named, and all ranks raise."""
    found = world.outcomes(different, kind)
    assert {one.error for one in found} == {"MismatchError"}, found
    words = " ".join(str(one.message) for one in found)
    assert "(2,)" in words or "allreduce" in words, words
    assert ("(3,)" if kind < 2 else "barrier") in words, words


def times_out() -> str:
    if bf.rank() == 0:
        time.sleep(2.5)
        try:
            bf.allreduce(torch.ones(2))
        except PeerError as error:
            return f"late: {error}"
        return "late: no error"
    try:
        bf.allreduce(torch.ones(2))
    except PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@SHARED
def test_who_comes_after_the_deadline_is_told_that_the_others_gave_up(world: World) -> None:
    """What they had posted counts no more."""
    late, *others = world.run(times_out, settings={"timeout": 1.0})
    assert late.startswith("late: "), late
    assert "no error" not in late, late
    for one in others:
        assert "WaitTimeoutError" in one, one
        assert "rank 0" in one, one
