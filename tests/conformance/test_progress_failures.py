"""An unexpected exception in the progress of a rank fails all its calls, and its peers are told."""

from __future__ import annotations

import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.engine import OperationSpec
from tests.support import BEFORE_DEADLINE, on, until
from tests.support.loops import on_each_rank

REASON = "it raised ValueError: boom; end and restart the run"


def fail(*_):
    raise ValueError("boom")


def break_by_hook(engine):
    engine.add_progress_hook(fail)


def break_by_poll(engine):
    engine.transport.poll = fail


def break_by_scan(engine):
    engine.matcher.scan_rings = fail


BREAKERS = {"hook": break_by_hook, "poll": break_by_poll, "scan": break_by_scan}


@pytest.mark.parametrize("late", [False, True], ids=["under-way", "idle"])
@pytest.mark.parametrize("how", BREAKERS)
@on("loopback-2", "mpi-2")
@on_each_rank
def test_no_call_waits_for_its_deadline(how, late):
    """All calls of that rank raise with the cause, others that need it raise, its thread ends.

    Rank 1 breaks while it waits, or before its next call; a rank 0 that needs it hears it.
    """
    bf.set_topology(topology.complete(bf.size()))
    x, started = torch.ones(3), time.monotonic()
    bf.barrier()
    if bf.rank() == 1:
        engine = bf.current().engine
        calls = {
            "verb": lambda: bf.neighbor_allreduce(x, name="y"),
            "collective": bf.barrier,
            "start": lambda: bf.allreduce_nonblocking(x),
            "window": lambda: bf.win_create(x, "w"),
        }
        if late:
            BREAKERS[how](engine)
        else:
            handle = bf.neighbor_allreduce_nonblocking(x, name="never")
            BREAKERS[how](engine)
            calls = {"handle": handle.wait, **calls}
        until(lambda: not engine.thread._thread.is_alive())
        for call in calls.values():
            with pytest.raises(bf.PeerError, match=f"^rank 1: .*: {REASON}$") as caught:
                call()
            assert isinstance(caught.value.__cause__, ValueError)
        assert not engine.busy
    else:
        for call in (lambda: bf.neighbor_allreduce(x, name="x"), bf.barrier):
            with pytest.raises(bf.PeerError, match=f"rank 1.*{REASON}"):
                call()
    assert time.monotonic() - started < BEFORE_DEADLINE


@on("loopback-2")
@on_each_rank
def test_an_unexpected_exception_of_one_operation_is_raised_by_its_call_alone():
    """An exception of any type in an operation is raised where it is waited for; others go on.

    An exception that no verb raises, in the steps of one operation.
    """

    def steps(op):
        yield from ()
        raise KeyError("boom")

    handle = bf.current().engine.submit(OperationSpec("strange", steps, "x"))
    until(handle.poll)
    with pytest.raises(KeyError, match="boom"):
        handle.wait()
    assert bf.allreduce(torch.ones(1)).item() == 1.0


class Unspeakable(str):
    """A name of which no message can be made."""

    secret = True

    def startswith(self, *given):
        if self.secret:
            raise ValueError("boom")
        return super().startswith(*given)


class Never:
    """A wait that does not end."""

    def done(self):
        return False

    def missing(self):
        return []


@on("loopback-2", "mpi-2")
@on_each_rank
def test_a_call_ends_even_if_no_message_can_be_made_of_it():
    """Else it would be in no list any more, so that no deadline ends it.

    Rank 1 breaks while it waits in a call whose description raises as well.
    """
    bf.barrier()
    if bf.rank() == 1:
        engine = bf.current().engine

        def steps(op):
            del op
            yield Never()

        name = Unspeakable("x")
        handle = engine.submit(OperationSpec("strange", steps, name))
        BREAKERS["hook"](engine)
        with pytest.raises(bf.PeerError, match=f"^rank 1: strange: {REASON}$"):
            handle.wait(BEFORE_DEADLINE)
        name.secret = False


@on("loopback-2", "mpi-2", "shared_memory-2", "c10d-4")
@on_each_rank
def test_names_are_strings():
    """Any other name is refused before anything is sent, by every verb that takes one."""
    x = torch.ones(4)
    peer = bf.rank() ^ 1
    calls = {
        "neighbor_allreduce": bf.neighbor_allreduce,
        "neighbor_allgather": bf.neighbor_allgather,
        "hierarchical_allreduce": bf.hierarchical_allreduce,
        "allreduce": bf.allreduce,
        "allgather": bf.allgather,
        "broadcast": bf.broadcast,
        "reduce_scatter": bf.reduce_scatter,
        "pair_gossip": lambda x, name: bf.pair_gossip(x, peer, name=name),
        "send": lambda x, name: bf.send(x, peer, name=name),
        "win_create": bf.win_create,
        "barrier": lambda x, name: bf.barrier(name=name),
        "a list": lambda x, name: bf.neighbor_allreduce([x], name=name),
        "a handle": lambda x, name: bf.neighbor_allreduce_nonblocking(x, name=name),
    }
    for _ in range(2):
        for name in (b"x", 5, ["x"], "\ud800"):
            for verb, call in calls.items():
                with pytest.raises(bf.ArgumentError, match="argument name: expected a"):
                    call(x, name=name)
                assert torch.equal(bf.allreduce(x), x), verb
