"""Groups of ranks: their collectives concern their members alone, and never match others'."""

from __future__ import annotations

import functools
import re
import time

import pytest
import torch

import asyncddp as bf
from tests.support import BEFORE_DEADLINE, LoopbackWorld, on
from tests.support.loops import on_each_rank
from tests.support.oracle import SHAPES, check, held, summed

MEMBERS = (0, 2, 3)
OF_FOUR = on("loopback-4", "shared_memory-4", "mpi-4")


def one(value=1.0):
    return torch.tensor([float(value)])


def told_by(call, kind=bf.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# making groups


def facts():
    everyone = bf.new_group()
    assert (list(everyone.ranks), everyone.size) == (list(range(bf.size())), bf.size())
    assert everyone.rank == bf.rank()
    last = bf.size() - 1
    some = bf.new_group({last, 0})
    assert list(some.ranks) == sorted({0, last})
    assert (bf.rank() in some) == (bf.rank() in (0, last))
    assert some.rank == {0: 0, last: some.size - 1}.get(bf.rank())
    return repr(some)


def test_a_group_knows_its_ranks(world):
    """Ascending, however they were given; a rank that is no member has no place in it."""
    n = world.size
    ranks = "rank 0" if n == 1 else f"ranks 0, {n - 1}"
    assert world.run(facts) == [f"<ProcessGroup: group 2, {ranks}>"] * n


def wrong_ranks():
    for ranks in ([], [0, 0]):
        assert told_by(lambda ranks=ranks: bf.new_group(ranks)) == (
            "new_group: argument ranks: expected at least one rank, and each once, got "
            f"{sorted(ranks)}"
        )
    for rank in (-1, bf.size(), True, "0"):
        told = told_by(lambda rank=rank: bf.new_group([rank]))
        assert told == (
            f"new_group: argument ranks: expected a rank in 0..{bf.size() - 1}, got {rank!r}"
        )
    return list(bf.new_group([0]).ranks)


@on("loopback-2", "mpi-2")
def test_impossible_ranks_are_refused(world):
    """In words, before anything is sent, so that the next group can be made."""
    assert world.run(wrong_ranks) == [[0], [0]]


def other_ranks():
    told = told_by(lambda: bf.new_group([0, 1] if bf.rank() == 1 else [0]), bf.MismatchError)
    return told, list(bf.new_group([0]).ranks)


@on("loopback-2", "loopback-4", "mpi-4")
def test_ranks_that_name_different_members_are_told_both_lists(world):
    """On all ranks; a group that all agree on can be made then."""
    for rank, (message, after) in enumerate(world.run(other_ranks)):
        assert message == (
            f"rank {rank}: new_group needs the same ranks, in calls of the same order, on all "
            "ranks, but rank 0 has ranks [0] in call 1, and rank 1 has ranks [0, 1] in call 1"
        )
        assert after == [0]


# calls

CALLS = {
    "allreduce": lambda **more: bf.allreduce(one(), **more),
    "allgather": lambda **more: bf.allgather(one(), **more),
    "allgather_object": lambda **more: bf.allgather_object(1, **more),
    "alltoall": lambda **more: bf.alltoall(torch.ones(6), **more),
    "barrier": lambda **more: bf.barrier(**more),
    "broadcast": lambda **more: bf.broadcast(one(), **more),
    "broadcast_object": lambda **more: bf.broadcast_object(1, **more),
    "gather": lambda **more: bf.gather(one(), **more),
    "recv": lambda **more: bf.recv(one(), 1 - bf.rank(), **more),
    "reduce": lambda **more: bf.reduce(one(), **more),
    "reduce_scatter": lambda **more: bf.reduce_scatter(torch.ones(6), **more),
    "scatter": lambda **more: bf.scatter(torch.ones(6), **more),
    "send": lambda **more: bf.send(one(), 1 - bf.rank(), **more),
}
"""Every verb that takes a group."""


def as_no_member(verb):
    group, told = bf.new_group([0]), None
    if bf.rank() > 0:
        told = told_by(lambda: CALLS[verb](group=group))
    with pytest.raises(bf.ArgumentError, match=rf"^{verb}: argument group: expected None or what"):
        CALLS[verb](group=[0, 1])
    return told, bf.allreduce(one()).item()


@pytest.mark.parametrize("verb", CALLS)
@on("loopback-2")
def test_who_is_no_member_is_told_so(world, verb):
    """By an ArgumentError; nothing has been sent."""
    (_, first), (told, second) = world.run(as_no_member, verb)
    assert told == (
        f"{verb}: argument group: expected a group with rank 1, which calls this, got "
        "<ProcessGroup: group 1, rank 0>; call it only where rank() in group"
    )
    assert first == second == 1.0


def test_a_group_ends_with_its_world():
    """A group of before init() is refused, with the remedy."""
    kept = LoopbackWorld(1).run(bf.new_group)
    told = LoopbackWorld(1).run(lambda: told_by(lambda: bf.allreduce(one(), group=kept[0])))
    assert told[0].startswith("allreduce: argument group: expected a group that this rank has made")
    assert told[0].endswith("of before; call new_group again")


@on("loopback-2", "mpi-2")
@on_each_rank
def test_a_root_is_a_member():
    """It is given by its rank in the world; another rank of the world is refused."""
    group = bf.new_group([1])
    if bf.rank() == 1:
        for verb in ("broadcast", "broadcast_object", "gather", "reduce", "scatter"):
            assert told_by(lambda verb=verb: getattr(bf, verb)(one(), 0, group=group)) == (
                f"{verb}: argument root_rank: expected a rank of the world that is in the group, "
                "got 0; its members are rank 1"
            )
        assert "dst_rank: expected a rank of the world that is in the group, got 0" in told_by(
            lambda: bf.send(one(), 0, group=group)
        )
        assert bf.broadcast(one(5), 1, group=group).item() == 5.0


# results


def results(group):
    """What each verb gives in a group of ranks."""
    ranks, rank = list(group.ranks), bf.rank()
    index, n = ranks.index(rank), len(ranks)
    for seed, shape in enumerate(SHAPES):
        of = functools.partial(held, shape=shape, dtype=torch.float32, seed=seed)
        x = of(rank)
        check(bf.allreduce(x, average=False, group=group), x, summed(ranks, of))
        y = of(rank)
        assert bf.allreduce_(y, group=group) is y
        check(y, x, summed(ranks, of) / n)
        for root in ranks:
            check(bf.broadcast(x, root, group=group), x, of(root))
        y = of(rank)
        assert bf.broadcast_(y, ranks[-1], group=group) is y
        assert torch.equal(y, of(ranks[-1]))
        assert torch.equal(x, of(rank)), "the input was changed"
    for length in (1, 30_000):
        rows = functools.partial(held, shape=(n * length, 2), dtype=torch.float64)
        mine = slice(index * length, (index + 1) * length)
        got = bf.reduce_scatter(rows(rank), group=group)
        check(got, rows(rank)[mine], summed(ranks, rows)[mine] / n)
        parts = functools.partial(held, shape=(rank * length, 2), dtype=torch.float64)
        whole = torch.cat([held(r, (r * length, 2), torch.float64) for r in ranks])
        assert torch.equal(bf.allgather(parts(rank), group=group), whole)


def in_a_group_of_three():
    group = bf.new_group(MEMBERS)
    if bf.rank() in group:
        results(group)
        bf.barrier(group=group)
    else:
        assert bf.rank() == 1
    return bf.allreduce(one(bf.rank()), average=False).item()


def objects_of_a_group():
    group, rank = bf.new_group(MEMBERS), bf.rank()
    for length in (1, 2_000_000) if rank in group else ():  # in slots, and too long for them
        objects = [(r, str(r) * length) for r in MEMBERS]
        assert bf.allgather_object((rank, str(rank) * length), group=group) == objects
        for root, found in zip(MEMBERS, objects, strict=True):
            mine = found if rank == root else None
            assert bf.broadcast_object(mine, root, group=group) == found
    return bf.allgather_object(rank)


@OF_FOUR
def test_objects_travel_in_a_group(world):
    """Of unequal lengths, from each root; and then among all ranks."""
    assert world.run(objects_of_a_group) == [[0, 1, 2, 3]] * 4


@OF_FOUR
def test_an_odd_number_of_ranks_meets_and_no_other_is_asked(world):
    """Results are those of the members; the next collective of all ranks is right."""
    assert world.run(in_a_group_of_three) == [6.0] * 4


@on("loopback-4", "mpi-4")
def test_groups_in_check_mode(world):
    """``ASYNCDDP_CHECK=1`` changes no result."""
    assert world.run(in_a_group_of_three, settings={"check": True}) == [6.0] * 4


@OF_FOUR
@on_each_rank
def test_what_travels_in_a_group_may_be_encoded():
    """compression= averages over the members."""
    group = bf.new_group(MEMBERS)
    if bf.rank() in group:
        x = held(bf.rank(), (70_001,), torch.float32)
        got = bf.allreduce(x, group=group, compression="bf16")
        exact = torch.stack([held(rank, x.shape, x.dtype) for rank in MEMBERS]).mean(dim=0)
        assert not torch.equal(got, exact)
        torch.testing.assert_close(got, exact, rtol=0, atol=0.05)


@on("loopback-1", "loopback-2", "shared_memory-2")
@on_each_rank
def test_a_group_of_all_ranks_gives_what_all_ranks_get():
    """Also of a single one."""
    results(bf.new_group([bf.rank()]) if bf.size() == 1 else bf.new_group())


def meets_in_group():
    group = bf.new_group(MEMBERS)
    if bf.rank() not in group:
        return None
    time.sleep(0.05 * bf.rank())
    entered = time.monotonic()
    bf.barrier_nonblocking(group=group).wait()
    return entered, time.monotonic()


@OF_FOUR
def test_nobody_leaves_a_group_s_barrier_before_all_members_have_come(world):
    """And the rank outside does not come."""
    told = world.run(meets_in_group)
    entered, left = zip(*(told[rank] for rank in MEMBERS), strict=True)
    assert max(entered) <= min(left)


# several groups


def crosswise(length):
    """Ranks 1 and 2 are in both groups, and begin with another one each."""
    groups = {"left": bf.new_group([0, 1, 2]), "right": bf.new_group([1, 2, 3])}
    order = ["left", "right"] if bf.rank() < 2 else ["right", "left"]
    handles = {}
    for number in range(3):
        for name in order:
            if bf.rank() in groups[name]:
                x = torch.full((length,), bf.rank() + 10.0 * number)
                start = bf.allreduce_nonblocking
                handles[name, number] = start(x, op="max", group=groups[name])
        if bf.rank() == 3:  # early on this rank
            handles["all", number] = bf.allreduce_nonblocking(one(bf.rank()), average=False)
    if bf.rank() != 3:
        for number in range(3):
            handles["all", number] = bf.allreduce_nonblocking(one(bf.rank()), average=False)
    found = {key: handle.wait() for key, handle in handles.items()}
    for (name, number), got in found.items():
        expected = {"left": 2.0 + 10 * number, "right": 3.0 + 10 * number, "all": 6.0}[name]
        assert (got == expected).all(), (name, number, got)


@pytest.mark.parametrize("length", [3, 50_000])
@OF_FOUR
def test_groups_that_overlap_do_not_wait_for_each_other(world, length):
    """Members begin what is under way in two groups, and in all ranks, in different orders."""
    world.run(crosswise, length)


def twins():
    first, second = bf.new_group(), bf.new_group()
    order = [first, second] if bf.rank() % 2 == 0 else [second, first]
    handles = {}
    for group in order:
        value = 1.0 if group is first else 10.0
        handles[group] = bf.allreduce_nonblocking(one(value), average=False, group=group)
    return handles[first].wait().item(), handles[second].wait().item()


@on("loopback-2", "mpi-4")
def test_groups_of_the_same_ranks_match_by_the_order_in_which_they_were_made(world):
    """What is sent in one never arrives in the other."""
    n = world.size
    assert world.run(twins) == [(1.0 * n, 10.0 * n)] * n


def unequally_often():
    low, high = bf.new_group([0, 1]), bf.new_group([2, 3])
    mine = low if bf.rank() < 2 else high
    for _ in range(100 if mine is low else 1):
        bf.allreduce(one(), group=mine)
        bf.barrier(group=mine)
    return bf.allgather(one(bf.rank())).tolist()


@OF_FOUR
def test_groups_may_differ_in_how_often_they_meet(world):
    """A collective of all ranks is right afterwards."""
    assert world.run(unequally_often) == [[0.0, 1.0, 2.0, 3.0]] * 4


# failures


def odd_member():
    group = bf.new_group(MEMBERS)
    if bf.rank() in group:
        x = torch.ones(3 if bf.rank() == 2 else 2)
        told = told_by(lambda: bf.allreduce(x, name="x", group=group), bf.MismatchError)
    else:
        told = ""
    return told, bf.allreduce(one(), average=False).item()


@OF_FOUR
def test_a_member_with_another_shape_is_told_in_its_group_alone(world):
    """The members name the group, both shapes and the rank; all ranks go on together."""
    told = world.run(odd_member)
    assert told[1] == ("", 4.0)
    for rank in MEMBERS:
        message, after = told[rank]
        assert message.startswith(f"rank {rank}, allreduce(average) 'x' (collective of group 1, ")
        assert re.search(r"expected shape \([23],\), got \([23],\)", message), message
        assert "rank 2" in message
        assert after == 4.0


def other_verb():
    group = bf.new_group(MEMBERS)
    calls = {0: bf.broadcast, 2: bf.allgather, 3: bf.broadcast}
    if bf.rank() not in group:
        return None
    return told_by(lambda: calls[bf.rank()](one(), group=group), bf.MismatchError)


@OF_FOUR
def test_a_member_in_another_verb_is_told(world):
    """Both verbs are named."""
    told = world.run(other_verb)
    for rank in MEMBERS:
        assert "verb allgather" in told[rank] or "got allgather" in told[rank]
        assert "broadcast(root_rank=0)" in told[rank]


def one_has_left():
    """Rank 2 returns; the other members need it."""
    group = bf.new_group(MEMBERS)
    if bf.rank() not in (0, 3):
        return None
    with pytest.raises(bf.PeerError) as caught:
        bf.allreduce(one(), group=group)
    return type(caught.value).__name__, caught.value.origin, str(caught.value)


@OF_FOUR
def test_a_member_that_has_left_is_told_of(world):
    """The other members raise PeerLeftError, whose origin it is."""
    told = world.run(one_has_left)
    for rank in (0, 3):
        kind, origin, message = told[rank]
        assert (kind, origin) == ("PeerLeftError", 2)
        assert "rank 2 has left (" in message


def late_members():
    """A member that leaves after its part does not harm the others' results."""
    group = bf.new_group(MEMBERS)
    if bf.rank() in group:
        return bf.allreduce(one(bf.rank()), average=False, group=group).item()
    return None


@OF_FOUR
def test_members_may_leave_once_their_part_is_done(world):
    """The rest get their results."""
    assert world.run(late_members) == [5.0, None, 5.0, 5.0]


def circle():
    group = bf.new_group([0, 1])
    started = time.monotonic()
    with pytest.raises(bf.DeadlockError) as caught:
        bf.allreduce(one(), group=group if bf.rank() == 0 else None)
    assert time.monotonic() - started < BEFORE_DEADLINE
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_a_circle_between_a_group_and_all_ranks_is_found(world):
    """One rank is in a collective of the group, the other in one of all ranks."""
    for message in world.run(circle):
        assert "rank 0 is in allreduce and expects (collective of group 1, number 0)" in message
        assert "rank 1 is in allreduce and expects (collective, number " in message
