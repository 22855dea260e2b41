"""Bytes that are no message: an error that names the peer, never run, and the engine goes on."""

from __future__ import annotations

import pickle
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.engine.messages import (
    ActiveMessage,
    DeadlockCycle,
    DeadlockProbe,
    MatchKey,
    TensorMessage,
    WaitForEdge,
    encode,
)
from tests.support import on, until
from tests.support.loops import on_each_rank

SENDER = 1
KEY = MatchKey("x", 0)
LINK = WaitForEdge(99, "barrier", KEY)
HUGE = (1 << 40, 1 << 20)
CAUGHT = r"rank 0: a message of rank 1 cannot be read \(.*\); run the same version of asyncddp"


class Bomb:
    """What pickle would run."""

    def __reduce__(self):
        return exec, ("import asyncddp; asyncddp.EXECUTED = True",)


STRANGE = {
    "pickle": pickle.dumps([Bomb()]),
    "old pickle": pickle.dumps(Bomb(), protocol=0),
    "nothing": b"",
    "part of a message": encode([ActiveMessage("s", ("text",), "", (), None, -1)])[:-3],
    "unknown dtype": encode([TensorMessage(KEY, "v", "load", (), None, 7)]),
    "no such rank": encode([DeadlockProbe((LINK,))]),
    "circle of others": encode([DeadlockCycle((WaitForEdge(1, "barrier", KEY),))]),
    "more memory than there is": encode([ActiveMessage("s", (), "float64", HUGE, None, 7)]),
}


@pytest.mark.parametrize("kind", STRANGE)
@on("loopback-2")
@on_each_rank
def test_a_rank_that_waits_is_told_at_once(kind):
    """Unreadable bytes raise PeerError that names their sender, and no pickle is executed.

    Rank 0 waits for the sender's tensor, and gets something else.
    """
    bf.set_topology(topology.complete(bf.size()))
    if bf.rank() == SENDER:
        bf.current().transport.post(0, STRANGE[kind])
    if bf.rank() == 0:
        with pytest.raises(bf.PeerError, match=CAUGHT) as caught:
            bf.neighbor_allreduce(torch.ones(3), name="x")
        assert "Error" in str(caught.value)
    assert not hasattr(bf, "EXECUTED")


@on("loopback-4", "mpi-2")
@on_each_rank
def test_a_rank_that_computes_is_told_by_its_next_verb():
    """The next verbs that need the sender raise PeerError, and no pickle is executed.

    Nobody waits: the next verb of rank 0 says it, and later ones fail that need the sender.
    """
    bf.set_topology(topology.complete(bf.size()))
    if bf.rank() == SENDER:
        bf.current().transport.post(0, STRANGE["pickle"])
    if bf.rank() == 0:
        engine, deadline = bf.current().engine, time.monotonic() + 30
        while engine.matcher.channels.late_error is None:
            assert time.monotonic() < deadline, "the message was not heard"
            time.sleep(0.001)
        for name in ("a", "b"):
            with pytest.raises(bf.PeerError, match=CAUGHT):
                bf.neighbor_allreduce(torch.ones(3), name=name)
        others = [peer for peer in range(2, bf.size())]
        with engine.active_messages() as active_messages:  # the engine still drives
            for peer in others:
                active_messages.send(peer, "nobody", ())
    assert not hasattr(bf, "EXECUTED")


@on("loopback-2", "mpi-2")
@on_each_rank
def test_words_that_a_service_does_not_know_are_an_error_that_names_the_peer():
    """The next verbs of receiver and sender raise PeerError, and verbs after them work.

    A service that expects other words fails by itself, on both ranks; the engine goes on.
    """
    bf.win_create(torch.ones(2), "w", zero_init=True)
    number = 0
    if bf.rank() == SENDER:
        with bf.current().engine.active_messages() as active_messages:
            active_messages.send(0, "windows", (number, "no such word", 1))
            active_messages.send(0, "windows", ())
    if bf.rank() in (0, SENDER):
        until(lambda: bf.current().engine.matcher.channels.late_error is not None)
        with pytest.raises(bf.PeerError, match="what rank 1 sent to windows could not be taken"):
            bf.barrier()
    bf.barrier()


def test_a_name_that_messages_cannot_carry_is_refused():
    """A name with a lone surrogate, which UTF-8 cannot encode, raises ArgumentError."""
    with (
        bf.local_world(2) as world,
        pytest.raises(bf.RankError, match="UTF-8 can encode") as caught,
    ):
        world.run(lambda: bf.neighbor_allreduce(torch.ones(1), name="\udcff"))
    assert isinstance(caught.value.__cause__, bf.ArgumentError)
