"""Collectives through slots of shared memory: late ranks, threads, other sizes, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import asyncddp as bf
from asyncddp.engine.messages import COLLECTIVE, GROUP_COLLECTIVE, MACHINE_COLLECTIVE
from asyncddp.errors import PeerError
from tests.support import World, on
from tests.support.loops import on_each_rank

SHARED = on("shared_memory-4")
LATE = 0.3  # seconds: the engine has taken over by then


def groups_with_slots() -> list[str]:
    bf.new_group([0, 1])
    bf.new_group([0])
    return list(bf.current().engine.matcher.slots)


@SHARED
def test_ranks_of_one_machine_have_slots(world: World) -> None:
    """Else nothing below would be tested; a group's own are for its members, if several."""
    for rank, found in enumerate(world.run(groups_with_slots)):
        assert found[:2] == [COLLECTIVE, MACHINE_COLLECTIVE]
        assert found[2:] == [GROUP_COLLECTIVE.format(1)] * (rank < 2)


@SHARED
@on_each_rank
def test_repeated_calls_give_what_the_first_gives() -> None:
    """Also with another layout in memory, ``out``, or torch mode than the call before."""
    rank, ranks = bf.rank(), bf.size()
    total = float(sum(range(ranks)))
    for dtype in (torch.float32, torch.float16, torch.int64):
        x = torch.full((2, 3), rank, dtype=dtype)
        out, moved = torch.empty_like(x), torch.full((3, 2), rank, dtype=dtype).t()
        for _ in range(3):
            for given in (x, moved, torch.nn.Parameter(x, requires_grad=False)):
                assert bf.allreduce(given, average=False).tolist() == [[total] * 3] * 2
            assert bf.allreduce(x, average=False, out=out) is out
            assert out.tolist() == [[total] * 3] * 2
            assert bf.allreduce(x, op="max").tolist() == [[ranks - 1.0] * 3] * 2
            place = x.clone()
            assert bf.allreduce_(place, False) is place
            assert place.tolist() == [[total] * 3] * 2
            assert bf.broadcast(x, ranks - 1).dtype == dtype
            assert bf.allgather(x).tolist() == [[float(r)] * 3 for r in range(ranks) for _ in "ab"]
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    for _ in range(3):
        with torch.no_grad():
            weight.fill_(rank)
        assert bf.allreduce_(weight, average=False) is weight
        assert weight.requires_grad
        assert weight.tolist() == [[total] * 3] * 2
        with torch.inference_mode():
            assert not bf.allreduce(weight).is_inference()


def repeated_mistakes() -> list[str]:
    x, found = torch.ones(3), []

    def told(call: Callable[[], object]) -> None:
        with pytest.raises(bf.AsyncDDPError) as caught:
            call()
        found.append(str(caught.value))

    for _ in range(2):
        bf.broadcast(x, 1)
        bf.reduce_scatter(torch.ones(bf.size()))
    told(lambda: bf.broadcast(x, True))
    told(lambda: bf.reduce_scatter(torch.ones(bf.size()), out=torch.ones(7)))
    told(lambda: torch.func.vmap(bf.allreduce)(torch.ones(3, 3)))
    return found


@SHARED
def test_repeated_calls_check_their_arguments(world: World) -> None:
    """Equal ones alone are known to be right."""
    for root, out, transform in world.run(repeated_mistakes):
        assert "expected a rank" in root
        assert "argument out" in out
        assert "torch.func" in transform


def other_shape_at_last(kind: int) -> None:
    last = bf.rank() == bf.size() - 1
    group = bf.new_group() if kind % 2 else None
    for _ in range(5):
        bf.allreduce(torch.ones(3), group=group)
    if kind < 2:
        bf.allreduce(torch.ones(2 if last else 3), group=group)
    elif last:
        bf.barrier(group=group)
    else:
        bf.allreduce(torch.ones(3), group=group)


@SHARED
@pytest.mark.parametrize("kind", range(4))
def test_a_rank_that_calls_another_collective_than_before_is_told(world: World, kind: int) -> None:
    """All raise, and both signatures are named, also in a group."""
    found = world.outcomes(other_shape_at_last, kind)
    assert {one.error for one in found} == {"MismatchError"}, found
    words = " ".join(str(one.message) for one in found)
    assert "(3,)" in words or "allreduce" in words, words
    assert ("(2,)" if kind < 2 else "barrier") in words, words


def groups_and_machines() -> None:
    rank, ranks = bf.rank(), bf.size()
    own = [one for one in range(ranks) if one % 2 == rank % 2]
    groups = [bf.new_group(range(0, ranks, 2)), bf.new_group(range(1, ranks, 2)), bf.new_group()]
    for step in range(20):
        x = torch.tensor([float(rank + step)])
        assert bf.allreduce(x, op="sum", group=groups[rank % 2]).item() == sum(own) + step * len(
            own
        )
        assert bf.allgather(x, group=groups[2]).tolist() == [float(r + step) for r in range(ranks)]
        mates = bf.current().local_ranks
        assert bf.local_allreduce(x, average=False).item() == sum(mates) + step * len(mates)
        bf.barrier(group=groups[rank % 2])
        mean = sum(range(ranks)) / ranks + step
        assert bf.hierarchical_allreduce(x).item() == mean


@SHARED
@pytest.mark.parametrize("per_machine", [1, 2])
def test_groups_and_machines_have_slots_of_their_own(world: World, per_machine: int) -> None:
    """Their collectives are in an order of their own."""
    world.run(groups_and_machines, settings={"ranks_per_machine": per_machine})


def late_in_a_group() -> str:
    group = bf.new_group([0, bf.size() - 1])
    if bf.rank() == 0:
        time.sleep(2.5)
    if bf.rank() not in group:
        return ""
    try:
        bf.barrier(group=group)
    except PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@SHARED
def test_a_group_names_the_ranks_of_the_world_that_it_waits_for(world: World) -> None:
    """Not their places in the group."""
    first, *others = world.run(late_in_a_group, settings={"timeout": 1.0})
    assert "no error" not in (first, others[-1])
    assert "missing: rank 0" in others[-1]
    assert f"rank {world.size - 1}" in others[-1]


@SHARED
@on_each_rank
def test_the_engine_takes_over_where_a_rank_is_late() -> None:
    """Whoever it is."""
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


@SHARED
@on_each_rank
def test_a_blocking_and_a_nonblocking_call_meet() -> None:
    """One on the calling thread, one by the engine."""
    for step in range(50):
        x = torch.tensor([bf.rank() + step])
        if (bf.rank() + step) % 2:
            total = bf.allreduce(x, average=False)
        else:
            total = bf.allreduce_nonblocking(x, average=False).wait()
        assert total.item() == sum(rank + step for rank in range(bf.size()))


@SHARED
@on_each_rank
def test_ranks_of_which_one_gives_more_than_slots_hold() -> None:
    """All go the way of messages then."""
    rank, ranks = bf.rank(), bf.size()
    for big in (1, 200_000):  # of which one fits into slots, and the other does not
        rows = torch.full((big if rank == 0 else 2, 2), float(rank))
        found = bf.allgather(rows)
        assert found.shape == (big + 2 * (ranks - 1), 2)
        assert found[-1].tolist() == [ranks - 1.0] * 2
        assert found[0].tolist() == [0.0, 0.0]
    long = "x" * 1_500_000 if rank == 0 else "y"
    assert bf.allgather_object(long)[:2] == ["x" * 1_500_000, "y"]
    assert bf.broadcast_object(long, 0) == "x" * 1_500_000


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
