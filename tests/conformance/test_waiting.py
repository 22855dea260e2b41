"""Nothing hangs silently: circles are found, slow ranks are waited for, deadlines speak."""

from __future__ import annotations

import logging
import random
import re
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, DELAY, FileEvent, LoopbackWorld, deadline_of, on, until


def one():
    return torch.ones(2)


# circles


def circle():
    """Everybody waits for the rank behind it, under a name of its own."""
    bf.set_topology(topology.ring(bf.size(), style="right"))
    started = time.monotonic()
    with pytest.raises(bf.DeadlockError) as caught:
        bf.neighbor_allreduce(one(), name=f"v{bf.rank()}")
    assert time.monotonic() - started < BEFORE_DEADLINE
    bf.barrier()  # the world goes on
    return str(caught.value)


def assert_names_circle(messages):
    n = len(messages)
    for rank, message in enumerate(messages):
        behind = (rank - 1) % n
        assert message.startswith(
            f"rank {rank}: neighbor_allreduce 'v{rank}' (use 0) can never end: rank {rank} is in "
            f"neighbor_allreduce and expects 'v{rank}' (use 0) of rank {behind}; "
        ), message
        for member in range(n):
            assert f"rank {member} is in neighbor_allreduce and expects 'v{member}'" in message
        assert "Call the same verbs with the same names and neighbours on all" in message
        assert f"rank {behind} has sent neighbor_allreduce 'v{behind}' (use 0) instead" in message


@on("loopback-2", "loopback-4", "mpi-2")
def test_a_circle_of_all_ranks_is_found_and_named_by_each(world):
    """A cycle of waits raises DeadlockError before the deadline, and the world goes on."""
    assert_names_circle(world.run(circle))


def test_a_circle_of_three():
    """A cycle of an odd number of ranks raises DeadlockError that names all of them."""
    assert_names_circle(LoopbackWorld(3).run(circle))


def wrong_order():
    """Two blocking verbs in two orders; the second ranks come later."""
    first, second = ("a", "b") if bf.rank() % 2 == 0 else ("b", "a")
    bf.set_topology(topology.ring(bf.size()))
    time.sleep(0.2 * (bf.rank() % 2))

    def both():
        bf.neighbor_allreduce(one(), name=first)
        bf.neighbor_allreduce(one(), name=second)

    with pytest.raises(bf.DeadlockError) as caught:
        both()
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_blocking_verbs_in_the_wrong_order(world):
    """Two names in opposite orders raise DeadlockError on both ranks, with both names."""
    for message in world.run(wrong_order):
        assert "expects 'a' (use 0) of rank" in message
        assert "expects 'b' (use 0) of rank" in message


def collectives_in_the_wrong_order():
    calls = [bf.barrier, lambda: bf.allreduce(one())]
    with pytest.raises(bf.MismatchError) as caught:
        [call() for call in (calls if bf.rank() % 2 else reversed(calls))]
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_collectives_in_the_wrong_order(world):
    """barrier() on one rank against allreduce on the other raises MismatchError on both."""
    for message in world.run(collectives_in_the_wrong_order):
        assert "expected verb" in message


def circle_beside_others():
    """Ranks 0 and 1 wait for each other; the others wait for them and hear why."""
    if bf.rank() < 2:
        peers = [1 - bf.rank()]
        with pytest.raises(bf.DeadlockError) as caught:
            bf.neighbor_allreduce(
                one(),
                self_weight=0.5,
                src_weights=dict.fromkeys(peers, 0.5),
                dst_weights=peers,
                name=f"v{bf.rank()}",
            )
        raise caught.value
    bf.neighbor_allreduce(
        one(), self_weight=0.5, src_weights={bf.rank() - 2: 0.5}, dst_weights=[], name="late"
    )


@on("loopback-4", "mpi-4")
def test_ranks_that_wait_for_a_circle_are_released(world):
    """Ranks outside of the cycle raise PeerLeftError when its members have left."""
    outcomes = world.outcomes(circle_beside_others)
    assert [outcome.error for outcome in outcomes[:2]] == ["DeadlockError"] * 2
    for outcome in outcomes[2:]:
        assert outcome.error == "PeerLeftError"
        assert f"rank {outcome.rank - 2} has left" in outcome.message
        assert outcome.seconds < BEFORE_DEADLINE


# no false alarms


def slow_ranks():
    """Longer than it takes to look for circles; everybody is late once."""
    for late in range(bf.size()):
        if bf.rank() == late:
            time.sleep(0.6)
        bf.neighbor_allreduce(one())
        bf.barrier()
    return True


@on("loopback-2", "loopback-4", "mpi-2")
def test_slow_ranks_are_waited_for(world):
    """A rank that is late by 0.6 s is no deadlock, whichever rank it is."""
    assert all(world.run(slow_ranks))


def patient(folder):
    """Two waits that would be a circle, were they not limited."""
    sent, given_up = FileEvent(folder / "sent"), FileEvent(folder / "given up")
    peer = [1 - bf.rank()]
    first, second = ("a", "b") if bf.rank() == 0 else ("b", "a")
    handle = bf.neighbor_allreduce_nonblocking(one(), name=first)
    sent.of(bf.rank()).set()
    sent.wait_for(peer)
    with pytest.raises(bf.WaitTimeoutError) as caught:
        handle.wait(timeout=0.8)
    given_up.of(bf.rank()).set()
    given_up.wait_for(peer)
    other = bf.neighbor_allreduce_nonblocking(one(), name=second)
    handle.wait()
    other.wait()
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_a_wait_with_a_limit_is_no_deadlock(world, tmp_path):
    """Waits with a timeout form no cycle: they time out, and the verbs complete later."""
    first, second = world.run(patient, tmp_path)
    assert first == (
        "rank 0: neighbor_allreduce 'a' (use 0) was not done in 0.8 s; missing: rank 1; rank 1 has "
        "sent neighbor_allreduce 'b' (use 0) instead"
    )
    assert "rank 0 has sent neighbor_allreduce 'a' (use 0) instead" in second


@given(st.integers(0, 10**6), st.integers(2, 5))
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_whatever_the_delays_and_orders_there_is_no_false_alarm(seed, n):
    """Each rank starts the same named verbs in an order of its own, with delays, and waits."""

    def case():
        mine = random.Random(seed * 10 + bf.rank())
        for step in range(3):
            names = [f"{step}.{k}" for k in range(5)]
            mine.shuffle(names)
            handles = []
            for name in names:
                handles.append(bf.neighbor_allreduce_nonblocking(one(), name=name))
                if mine.random() < 0.3:
                    time.sleep(mine.choice([0.0, 0.01, 0.3]) * mine.random())
            mine.shuffle(handles)
            for handle in handles:
                assert handle.wait().tolist() == [1.0, 1.0]
            if mine.random() < 0.2:
                time.sleep(0.35)
            bf.neighbor_allreduce(one(), name=f"{step} blocking")

    LoopbackWorld(n).run(case)


# deadlines


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append((record.levelname, record.getMessage()))


def never_comes(verb, folder):
    """Rank 0 stays away; all others warn once, then raise."""
    heard, log = _Heard(), logging.getLogger("asyncddp")
    given_up = FileEvent(folder / "given up")
    log.addHandler(heard)
    log.propagate = False
    try:
        if bf.rank() == 0:
            given_up.wait()
            return None
        calls = {
            "neighbor_allreduce": lambda: bf.neighbor_allreduce(one(), name="w"),
            "barrier": lambda: bf.barrier(name="w"),
            "pair_gossip": lambda: bf.pair_gossip(one(), 0, name="w"),
        }
        started = time.monotonic()
        with deadline_of(1.5, warn_after=0.3), pytest.raises(bf.WaitTimeoutError) as caught:
            calls[verb]()
        seconds = time.monotonic() - started
        given_up.set()
        return seconds, str(caught.value), heard.messages
    finally:
        log.propagate = True
        log.removeHandler(heard)


@on("loopback-2", "mpi-2")
@pytest.mark.parametrize(
    ("verb", "called"),
    [
        ("neighbor_allreduce", "neighbor_allreduce 'w' (use 0)"),
        ("barrier", "barrier 'w' (collective, number 0)"),
        ("pair_gossip", "pair_gossip 'w.0-1' (use 0)"),
    ],
    ids=["neighbour", "collective", "gossip"],
)
def test_a_wait_warns_once_with_the_missing_ranks_and_then_raises(world, tmp_path, verb, called):
    """A wait logs one warning after warn_after, and raises an error at its deadline."""
    _, (seconds, message, heard) = world.run(never_comes, verb, tmp_path)
    assert 1.5 <= seconds < 1.5 + DELAY
    assert re.fullmatch(
        re.escape(f"rank 1: {called} was not done in ")
        + r"[\d.]+ s \(ASYNCDDP_TIMEOUT=1\.5\); missing: rank 0",
        message,
    ), message
    (level, warning), *more = heard
    assert (level, more) == ("WARNING", [])
    waiting = re.escape(f"rank 1: {called} has been waiting for ")
    assert re.fullmatch(waiting + r"\d+ s; missing: rank 0", warning), warning


def later_and_later(folder):
    """Rank 0 stays away; the deadline of the rank that came first passes first."""
    given_up = FileEvent(folder / "given up")
    if bf.rank() == 0:
        given_up.wait_for(range(1, bf.size()))
        return None
    time.sleep(0.3 * bf.rank())
    with deadline_of(1.5), pytest.raises(bf.PeerError) as caught:
        bf.allreduce(one())
    given_up.of(bf.rank()).set()
    return type(caught.value).__name__, caught.value.origin, str(caught.value)


@on("loopback-4", "mpi-4")
def test_a_deadline_that_has_passed_on_one_rank_is_one_on_all(world, tmp_path):
    """The others hear of it before their own, and raise what that rank raised, with its origin."""
    told = world.run(later_and_later, tmp_path)
    for rank, (kind, origin, message) in enumerate(told[1:], start=1):
        assert kind == "WaitTimeoutError"
        began = "allreduce (collective, number 0) was not done in "
        if origin is None:  # its own deadline
            assert message.startswith(f"rank {rank}: {began}")
        else:
            assert origin in {1, 2, 3} - {rank}
            assert f"rank {origin}: {began}" in message


def one_has_left():
    """Rank 0 returns; the others need it in a collective."""
    if bf.rank() == 0:
        return None
    with pytest.raises(bf.PeerError) as caught:
        bf.allreduce(one())
    return type(caught.value).__name__, caught.value.origin, str(caught.value)


@on("loopback-4", "mpi-4")
def test_a_collective_that_one_rank_has_left_fails_on_all_others(world):
    """All others raise PeerLeftError, whose origin is the rank that has left."""
    for kind, origin, message in world.run(one_has_left)[1:]:
        assert (kind, origin) == ("PeerLeftError", 0)
        assert "rank 0 has left (" in message


def test_a_collective_s_wait_is_told_of_once_for_all_ranks(caplog):
    """By the lowest rank that waits, and it names who is late, though no collective tells that."""
    warned = threading.Event()

    class Hearing(logging.Handler):
        def emit(self, record):
            warned.set()

    def case():
        bf.barrier()
        if bf.rank() == 2:
            assert warned.wait(60)
            time.sleep(0.5)  # for those that would warn as well
        bf.allreduce(one(), name="w")

    logger, hearing = logging.getLogger("asyncddp"), Hearing()
    logger.addHandler(hearing)
    try:
        with caplog.at_level(logging.WARNING, "asyncddp"), bf.local_world(5, warn_after=3) as world:
            world.run(case)
    finally:
        logger.removeHandler(hearing)
    (message,) = [record.getMessage() for record in caplog.records]
    who = "4 ranks \\(0, 1, 3, 4\\)"
    called = "allreduce 'w' \\(collective, number 1\\)"
    assert re.fullmatch(rf"{who} wait for rank 2, in {called}, since \d+ s", message), message


def nobody_waits(folder):
    """A non-blocking verb has its deadline too, though nobody waits for it."""
    given_up = FileEvent(folder / "given up")
    if bf.rank() == 0:
        given_up.wait()
        return None
    with deadline_of(0.4):
        handle = bf.neighbor_allreduce_nonblocking(one(), name="w")
        until(handle.poll, "the deadline")
    with pytest.raises(bf.WaitTimeoutError) as caught:
        handle.wait()
    given_up.set()
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_a_handle_that_nobody_waits_for_meets_its_deadline(world, tmp_path):
    """A verb fails at its deadline without wait(), which then raises WaitTimeoutError."""
    assert "missing: rank 0" in world.run(nobody_waits, tmp_path)[1]
