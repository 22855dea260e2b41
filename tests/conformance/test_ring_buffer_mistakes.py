"""Ranks that stop fitting together after their tensors went through ring buffers for a while.

What is exchanged through ring buffers carries no header, so that only the progress engine can find
a contradiction: every rank concerned raises soon, with the words of
:mod:`tests.conformance.test_mismatches`, and the same name works on afterwards.
"""

from __future__ import annotations

import re
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.conformance.test_mismatches import (
    EXPECTED,
    ODD,
    REMEDY,
    caught,
    differs,
    until_told,
    works_on,
)
from tests.support import BEFORE_DEADLINE, DELAY, FileEvent, deadline_of, on, until
from tests.support.loops import on_each_rank
from tests.support.pairwise import pairwise

NEAR = on("shared_memory-4")
USES = 4
"""Uses after which a name goes through ring buffers."""
FORMS = ["blocking", "in place", "nonblocking"]
SOME = [("blocking", "small"), ("in place", "in pieces"), ("nonblocking", "small")]
SIZES = {"small": (6,), "in pieces": (150_001,)}


def average(x, form, name="w", **more):
    if form == "in place":
        return bf.neighbor_allreduce_(x, name=name, **more)
    if form == "nonblocking":
        return bf.neighbor_allreduce_nonblocking(x, name=name, **more).wait()
    return bf.neighbor_allreduce(x, name=name, **more)


def go_on(shape=(6,), uses=USES, name="w", form="blocking", make=torch.empty):
    """The complete graph, uses of one name, all of them right."""
    bf.set_topology(topology.complete(bf.size()))
    for k in range(uses):
        x = make(shape).fill_(float(bf.rank() + k))
        got = average(x, form, name)
        want = (bf.size() - 1) / 2 + k
        torch.testing.assert_close(got, torch.full(shape, want), msg=f"use {k} of {uses}")


def through_rings(name="w"):
    """Whether the name goes through ring buffers, to and from all others."""
    others = [rank for rank in range(bf.size()) if rank != bf.rank()]
    found = bf.current().engine.matcher.channels.find_all(name)
    return any(channel.serves(others, others) for channel in found)


# another shape, dtype or verb


def another(kind, form, size):
    shape, dtype, verb = SIZES[size], torch.float32, None
    go_on(shape, form=form)
    assert through_rings()
    odd = bf.rank() == ODD
    if kind == "shape":
        shape = (3, 1) if odd else (2,)
    if kind == "dtype" and odd:
        dtype = torch.float64
    if kind == "verb" and odd:
        verb = bf.neighbor_allgather
    x = torch.ones(shape, dtype=dtype)
    told = caught(lambda: verb(x, name="w") if verb else average(x, form))
    go_on(SIZES[size], 2 * USES, form=form)
    works_on()
    assert through_rings()
    return told


@pairwise(
    kind=EXPECTED.keys(),
    form=FORMS,
    size=SIZES.keys(),
    world=["shared_memory-2", "shared_memory-4"],
)
def test_a_neighbour_with_another(world, kind, form, size):
    """Shape, dtype or verb: all ranks name the use, two ranks, expected and got, and go on."""
    expected, got = EXPECTED[kind]
    for rank, (error, message) in enumerate(world.run(another, kind, form, size)):
        assert error == "MismatchError"
        assert message.startswith(f"rank {rank}, neighbor_all"), message
        assert f"'w' (use {USES}), " in message, message
        if kind != "dtype" or size == "small":
            assert re.search(differs(expected, got), message), message
        assert f"rank {ODD}" in message, message


def both_through_rings(kind):
    """Either signature has ring buffers of its own by now."""
    one, two = (torch.ones(2), torch.ones(3, 1)) if kind == "shape" else (
        torch.ones(2), torch.ones(2, dtype=torch.float64)
    )  # fmt: skip
    bf.set_topology(topology.complete(bf.size()))
    for _ in range(USES):
        bf.neighbor_allreduce(one, name="w")
        bf.neighbor_allreduce(two, name="w")
    told = caught(lambda: bf.neighbor_allreduce(two if bf.rank() == ODD else one, name="w"))
    for _ in range(USES):
        assert torch.equal(bf.neighbor_allreduce(two, name="w"), two)
        assert torch.equal(bf.neighbor_allreduce(one, name="w"), one)
    works_on()
    return told


@NEAR
@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_two_signatures_that_both_have_ring_buffers(world, kind):
    """Nothing at all goes by message then, and each polls a ring buffer that stays as it is."""
    for rank, (error, message) in enumerate(world.run(both_through_rings, kind)):
        assert error == "MismatchError"
        assert f"rank {rank}, neighbor_allreduce 'w' (use {2 * USES}), " in message
        assert re.search(differs(*EXPECTED[kind]), message), message


# another name


def another_name(form):
    for name in ("w", "mine", "afterwards"):
        go_on(name=name)
    told = caught(lambda: average(torch.ones(6), form, "mine" if bf.rank() == ODD else "w"))
    go_on(uses=2 * USES, name="afterwards")
    return told


@NEAR
@pytest.mark.parametrize("form", FORMS)
def test_a_neighbour_with_another_name(world, form):
    """Both have ring buffers; both names are told, and who is in which."""
    told = world.run(another_name, form)
    for rank, (_, message) in enumerate(told):
        name = "mine" if rank == ODD else "w"
        assert message.startswith(f"rank {rank}"), message
        assert f"neighbor_allreduce {name!r} (use {USES})" in message, message
        assert f"rank {ODD} is in neighbor_allreduce and expects 'mine' (use {USES}) of" in message
        assert re.search(rf"rank [023] is in neighbor_allreduce and expects 'w' \(use {USES}\)",
                         message), message  # fmt: skip
        assert "Call the same verbs with the same names and neighbours" in message
    assert told[ODD][0] == "DeadlockError"


def crossed(folder):
    """Two blocking verbs in two orders."""
    raised = FileEvent(folder / "raised")
    for name in ("a", "b"):
        go_on(name=name)
    first, second = ("a", "b") if bf.rank() % 2 == 0 else ("b", "a")

    def both():
        bf.neighbor_allreduce(torch.ones(6), name=first)
        bf.neighbor_allreduce(torch.ones(6), name=second)

    told = caught(both)
    raised.of(bf.rank()).set()
    raised.wait_for(range(bf.size()))  # nobody has more to tell, and what was told arrives soon
    for name in ("a", "b", "c"):  # each use ended in an error on every rank, or was not begun
        time.sleep(0.2)
        bf.current().engine.matcher.channels.late_error = None
        go_on(uses=USES, name=f"{name} afterwards")
    return told


@NEAR
def test_names_that_cross_are_a_deadlock(world, tmp_path):
    """Two blocking names in opposite orders raise on all ranks, with both names."""
    told = world.run(crossed, tmp_path)
    assert "DeadlockError" in [error for error, _ in told]
    for _, message in told:
        assert f"expects 'a' (use {USES}) of rank" in message
        assert f"expects 'b' (use {USES}) of rank" in message


# other neighbours


def alone(targets=(), sources=()):
    weights = dict.fromkeys(sources, 0.5)
    given = {"self_weight": 0.5, "src_weights": weights, "dst_weights": list(targets)}
    return bf.neighbor_allreduce(torch.ones(6), name="w", **given)


def unexpected(form):
    """Rank 0 sends to rank 1, which expects nothing; both have used ring buffers before."""
    go_on(form=form)
    told = None
    if bf.rank() == 0:
        alone(targets=[1])
    elif bf.rank() == 1:
        time.sleep(0.1)
        alone()
    else:
        alone()
    if bf.rank() < 2:
        until_told()
        told = caught(lambda: bf.neighbor_allreduce(torch.ones(1), name="next"))[1]
    works_on_default()
    return told


def works_on_default():
    bf.set_topology(topology.complete(bf.size()))
    works_on()


@NEAR
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_nobody_expects(world, form):
    """Both verbs have ended by then: sender and receiver are told in their next ones."""
    told = world.run(unexpected, form)
    problem = (
        f"rank 1 expected nothing from rank 0 in neighbor_allreduce 'w' (use {USES}), got a "
        f"tensor: it receives from [] and sends to []; {REMEDY}"
    )
    assert told[0] == f"rank 0, 'w' (use {USES}), refused by rank 1: {problem}"
    assert told[1] == problem
    assert told[2:] == [None] * (world.size - 2)


def unexpected_by_one_that_waits(folder):
    """Rank 0 sends to rank 1, which expects nothing of it and waits for another one."""
    raised = FileEvent(folder / "raised")
    go_on()
    told = None
    if bf.rank() == 0:
        alone(targets=[1])
    elif bf.rank() == 1:
        told = caught(lambda: alone(sources=[2]))[1]
        raised.set()
    elif bf.rank() == 2:
        raised.wait()
        until(lambda: bf.current().engine.matcher.refused, "what rank 1 tells of it")
        told = caught(lambda: alone(targets=[1]))[1]
    else:
        alone()
    if bf.rank() == 0:
        until_told()
        told = caught(lambda: bf.neighbor_allreduce(torch.ones(1), name="next"))[1]
    return told


@on("shared_memory-4")
def test_a_tensor_that_is_not_expected_beside_one_that_is(world, tmp_path):
    """The receiver raises while it waits; who comes to it later hears of it as well."""
    told = world.run(unexpected_by_one_that_waits, tmp_path)
    assert "refused by rank 1: rank 1 expected nothing from rank 0" in told[0]
    assert "peer rank 0: expected nothing from rank 0, got a tensor" in told[1]
    assert "rank 1 expected nothing from rank 0" in told[2]


def expected_in_vain(form):
    """Rank 1 expects a tensor of rank 0, which is in the same verb and sends none."""
    go_on(form=form)
    told = None
    if bf.rank() == 1:
        told = caught(lambda: alone(sources=[0]))[1]
    else:
        alone()
    if bf.rank() == 0:
        until_told()
        told = caught(lambda: bf.neighbor_allreduce(torch.ones(1), name="next"))[1]
    works_on_default()
    return told


@NEAR
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_expected_and_never_sent(world, form):
    """Both raise: the receiver at once, the sender, whose verb was over, in its next one."""
    told = world.run(expected_in_vain, form)
    problem = f"rank 0 sends nothing to rank 1: it receives from [] and sends to []; {REMEDY}"
    assert told[1] == f"rank 1, neighbor_allreduce 'w' (use {USES}), refused by rank 0: {problem}"
    assert told[0].startswith(f"rank 0, 'w' (use {USES}), refused by rank 1: ")
    assert problem in told[0]


@on("shared_memory-4")
@on_each_rank
def test_a_mistake_that_is_found_late_is_told_once():
    """After the error of a late mismatch, further uses of the name succeed in ring buffers.

    The name of a mistake that was told is used again.
    """
    unexpected("blocking")
    bf.barrier()
    go_on(uses=2 * USES)
    assert through_rings()


def told_again():
    """The same, with patience for further errors."""
    unexpected("blocking")
    bf.barrier()
    for _ in range(USES):
        try:
            bf.neighbor_allreduce(torch.ones(6), name="w")
        except bf.MismatchError:
            time.sleep(0.2)
    bf.barrier()
    bf.current().engine.matcher.channels.late_error = None
    go_on(uses=2 * USES)
    return through_rings()


@on("shared_memory-4")
def test_a_name_works_on_after_a_mistake_that_was_found_late(world):
    """No step of it may count as under way for ever."""
    assert all(world.run(told_again))


# ranks that come late


def busy(seconds):
    """Compute, and let go of the interpreter only when it says so."""
    over = time.monotonic() + seconds
    total = 0
    while time.monotonic() < over:
        total += sum(range(100))
    return total


def comes_late(how, form, size, make):
    """Everybody is late once, for longer than it takes to look for circles."""
    make = torch.empty if make == "ordinary" else bf.empty_shared
    go_on(SIZES[size], form=form, make=make)
    for late in range(bf.size()):
        if bf.rank() == late:
            busy(0.5) if how == "busy" else time.sleep(0.5)
        go_on(SIZES[size], 1, form=form, make=make)
    go_on(SIZES[size], 3, form=form, make=make)
    assert bf.current().engine.matcher.channels.late_error is None
    return True


@pytest.mark.exhaustive
@NEAR
@pytest.mark.parametrize(("form", "size"), [("in place", "in pieces"), ("blocking", "small")])
@pytest.mark.parametrize(("how", "make"), [("busy", "ordinary"), ("asleep", "shared")])
def test_ranks_that_come_late_are_waited_for(world, how, form, size, make):
    """Ranks that are late by 0.5 s in turn cause no error, and all results are right."""
    assert all(world.run(comes_late, how, form, size, make))


def never_comes(form, size, folder):
    """Rank 0 stays away past the deadline of the others."""
    raised = FileEvent(folder / "raised")
    go_on(SIZES[size], form=form)
    if bf.rank() == 0:
        raised.wait_for(range(1, bf.size()))
        return None
    started = time.monotonic()
    with deadline_of(1.0), pytest.raises(bf.PeerError) as info:
        average(torch.ones(SIZES[size]), form)
    seconds = time.monotonic() - started
    raised.of(bf.rank()).set()
    return seconds, str(info.value)


@NEAR
@pytest.mark.parametrize(("form", "size"), SOME)
def test_a_rank_that_never_comes(world, tmp_path, form, size):
    """The others raise by the deadline, and say who is missing."""
    told = world.run(never_comes, form, size, tmp_path)
    assert max(seconds for seconds, _ in told[1:]) >= 1.0
    for rank, (seconds, message) in enumerate(told[1:], 1):
        assert seconds < 1.0 + DELAY
        late = rf"neighbor_allreduce 'w' \(use {USES}\) was not done in [\d.]+ s "
        late += r"\(ASYNCDDP_TIMEOUT=1\); missing: rank 0"
        refused = rf"rank {rank}, neighbor_allreduce 'w' \(use {USES}\), "
        refused += r"(refused|given up) by rank \d: "
        assert re.match(rf"({refused})?rank \d: {late}", message), message
    assert any(" by rank " not in message for _, message in told[1:])


def comes_too_late(form, size, folder):
    """Rank 0 comes when the others have given up."""
    raised, told_too = FileEvent(folder / "raised"), FileEvent(folder / "told too")
    go_on(SIZES[size], form=form)
    if bf.rank() == 0:
        raised.wait_for(range(1, bf.size()))
        until(lambda: bf.current().engine.matcher.refused, "what the others tell of it")
        try:
            average(torch.ones(SIZES[size]), form)
            told = "it ended well"
        except bf.PeerError as error:
            told = str(error)
        told_too.set()
    else:
        with (
            deadline_of(1.0),
            pytest.raises(bf.PeerError) as info,
        ):  # of the time, or of another one's
            average(torch.ones(SIZES[size]), form)
        told = str(info.value)
        raised.of(bf.rank()).set()
        told_too.wait()
    bf.barrier()
    go_on(SIZES[size], 2 * USES, form=form)
    works_on()
    return told


@NEAR
@pytest.mark.parametrize(("form", "size"), SOME)
def test_after_a_rank_that_came_too_late_the_name_works_on(world, tmp_path, form, size):
    """Whether or not what it wanted was still there."""
    told = world.run(comes_too_late, form, size, tmp_path)
    assert "was not done in" in told[0] or told[0] == "it ended well"
    assert all("missing: rank 0" in message for message in told[1:])


@on("shared_memory-2")
def test_a_rank_that_comes_too_late_is_told_as_well(world, tmp_path):
    """As without ring buffers: what has failed for its neighbours does not end well for it."""
    told = world.run(comes_too_late, "in place", "small", tmp_path)
    head = rf"rank 0, neighbor_allreduce 'w' \(use {USES}\), (refused|given up) by rank "
    assert re.match(head, told[0]), told[0]
    assert "was not done in" in told[0]


def ends_early():
    """Rank 0 leaves the world while the others go on with it."""
    go_on()
    if bf.rank() == 0:
        return None
    started = time.monotonic()
    with pytest.raises(bf.PeerError) as info:
        go_on(uses=50)
    assert time.monotonic() - started < BEFORE_DEADLINE
    return str(info.value)


@NEAR
def test_a_rank_that_has_left_is_named(world):
    """Ranks that need one which called shutdown() raise PeerError before their deadline."""
    for message in world.run(ends_early)[1:]:
        assert "rank 0 has left (it called shutdown()), but is needed" in message
