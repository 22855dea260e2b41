"""Who is missing in ``init()``, found out before there is MPI."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import pytest

from asyncddp.config import Config
from asyncddp.errors import WaitTimeoutError
from asyncddp.transport.startup_deadline import InitArrivalTracker, StartupDeadline

JOB = f"test-{os.getpid()}"


def start(presence, size=3, waited=0.0, **deadlines):
    made = StartupDeadline(
        0, size, dataclasses.replace(Config(), **deadlines), pytest.fail, presence
    )
    made._deadline.started -= waited
    return made


def test_a_rank_is_present_while_it_waits():
    """A rank counts as arrived while its tracker is entered, and for its own job only."""
    mine, other = InitArrivalTracker(JOB, 0, 3), InitArrivalTracker(JOB, 2, 3)
    with mine:
        assert mine.arrived(3) == [0]
        with other:
            assert mine.arrived(3) == [0, 2]
            assert InitArrivalTracker(f"{JOB}-another", 1, 3).arrived(3) == [1]
        assert mine.arrived(3) == [0]


def test_a_rank_that_gave_up_is_not_called_missing():
    """Deadlines of ranks that came together pass some moments after each other."""
    mine, other = InitArrivalTracker(JOB, 0, 3), InitArrivalTracker(JOB, 2, 3)
    with mine:
        with pytest.raises(WaitTimeoutError), other:
            raise WaitTimeoutError("rank 2: init() was not done")
        assert mine.arrived(3) == [0, 2]
        with InitArrivalTracker(JOB, 2, 3):  # it tries again
            assert mine.arrived(3) == [0, 2]
        assert mine.arrived(3) == [0]


@pytest.mark.parametrize(
    ("environment", "here"),
    [({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3), ({"MPI_LOCALNRANKS": "2"}, 2), ({}, None)],
)
def test_the_launcher_says_how_many_are_on_the_machine(monkeypatch, environment, here):
    """The number of local ranks is the launcher's; without it there is no tracker."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = InitArrivalTracker.from_environment(0)
    assert (None if found is None else found.local_size) == here


@pytest.mark.parametrize(
    ("here", "size", "others", "told"),
    [
        (3, 3, [2], "missing: rank 1"),
        (4, 4, [], "missing: ranks 1\u20133"),
        (3, 6, [2], "missing: 1 of the 3 ranks of machine {host}, where ranks 0, 2 are here"),
        (1, 6, [], "missing: ranks of other machines; all 1 of machine {host} have called it"),
        (None, 6, [], "not all 6 ranks have called it"),
    ],
)
def test_who_is_missing_is_warned_of_once_and_then_an_error(here, size, others, told, caplog):
    """``init`` names the missing ranks as far as known, in one warning and in its error."""
    presences = [InitArrivalTracker(JOB, other, here) for other in others]
    mine = None if here is None else InitArrivalTracker(JOB, 0, here)
    with contextlib.ExitStack() as stack:
        for one in (mine, *presences):
            stack.enter_context(one or contextlib.nullcontext())
        waiting = start(mine, size, waited=2.0, warn_after=1.0, timeout=3.0)
        assert waiting.check() is None
        assert waiting.check() is None
        waiting._deadline.started -= 2.0
        error = waiting.check()
    expected = told.format(host=os.uname().nodename)
    assert caplog.messages == [f"rank 0: init() has been waiting for 2 s; {expected}"]
    assert isinstance(error, WaitTimeoutError)
    assert str(error) == f"rank 0: init() was not done in 4.0 s (ASYNCDDP_TIMEOUT=3); {expected}"


def test_once_all_have_come_mpi_gets_its_time_to_start(caplog):
    """On a busy machine that takes longer than a deadline which is short, and no rank is late."""
    with InitArrivalTracker(JOB, 0, 2) as mine, InitArrivalTracker(JOB, 1, 2):
        waiting = start(mine, 2, waited=30.0, warn_after=1.0, timeout=3.0)
        assert waiting.check() is None
        waiting._deadline.started -= 60.0
        assert "all ranks have called it, but MPI has not started" in str(waiting.check())
    assert caplog.messages == []
