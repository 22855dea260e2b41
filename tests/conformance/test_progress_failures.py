"""An unexpected exception in the progress of a rank fails all its calls, and its peers are told."""

from __future__ import annotations

import time

import pytest
import torch

import asyncddp as bf
import topology
from asyncddp.engine import OperationSpec
from tests.support import BEFORE_DEADLINE, on, until

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


def one_rank_breaks(how, late):
    """Rank 1 breaks while it waits, or before its next call; a rank 0 that needs it hears it."""
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


@pytest.mark.parametrize("late", [False, True], ids=["under-way", "idle"])
@pytest.mark.parametrize("how", BREAKERS)
@on("loopback-2", "mpi-2")
def test_no_call_waits_for_its_deadline(world, how, late):
    """All calls of that rank raise with the cause, others that need it raise, its thread ends."""
    world.run(one_rank_breaks, how, late)


def step_fails_unexpectedly():
    """An exception that no verb raises, in the steps of one operation."""

    def steps(op):
        yield from ()
        raise KeyError("boom")

    handle = bf.current().engine.submit(OperationSpec("strange", steps, "x"))
    until(handle.poll)
    with pytest.raises(KeyError, match="boom"):
        handle.wait()
    assert bf.allreduce(torch.ones(1)).item() == 1.0


@on("loopback-2")
def test_an_unexpected_exception_of_one_operation_is_raised_by_its_call_alone(world):
    """An exception of any type in an operation is raised where it is waited for; others go on."""
    world.run(step_fails_unexpectedly)
