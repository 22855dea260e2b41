"""The harness itself: a test fails when a rank does, whatever the way, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import pytest

import asyncddp as bf
from tests.support import (
    LoopbackWorld,
    ProcessPoolError,
    RanksFailedError,
    on,
    run_on_mpirun,
    run_to_end,
)
from tests.support.leaks import Traces
from tests.support.processes import REPO, Finished, warm_server

BOTH = on("loopback-2", "mpi-2")


def tells_rank():
    return bf.rank()


def fails_on(rank):
    if bf.rank() == rank:
        raise ValueError(f"rank {rank} had enough")
    bf.barrier()


def hangs_on(rank):
    if bf.rank() == rank:
        threading.Event().wait(60)


def sets_handlers():
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # as Lightning's Trainer does in the end
        signal.signal(number, signal.getsignal(number))


def dies_on(rank):
    if bf.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)


def sets_a_variable():
    os.environ["LEFT_BY_A_CASE"] = "1"


def sees_the_variable():
    return "LEFT_BY_A_CASE" in os.environ


def unpicklable():
    return threading.Lock()


INNER = """
import os, subprocess, threading, time
import asyncddp as bf
from tests.conftest import *
from tests.conftest import _leaves_nothing_behind
from tests.support import on

def body():
    assert bf.rank() == 0, "this rank is not the first"

@on("loopback-2", "mpi-2")
def test_failing_rank(world):
    world.run(body)

def test_leaks_thread():
    threading.Thread(target=time.sleep, args=(4,), name="idler").start()

def test_leaks_process():
    subprocess.Popen(["sleep", "4"])

def test_leaks_variable():
    os.environ["FORGOTTEN"] = "1"

def test_clean():
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"  # as torch 2.6 to 2.8 do when CUDA starts
"""


@pytest.fixture(scope="module")
def inner(tmp_path_factory) -> Finished:
    """A test file that is run in a pytest of its own, with this repository's fixtures."""
    folder = tmp_path_factory.mktemp("inner")
    test = folder / "test_inner.py"
    test.write_text(INNER, encoding="utf-8")
    options = [f"--rootdir={folder}", f"--config-file={REPO}/pyproject.toml"]
    options += ["-p", "no:cacheprovider", "-W", "ignore::ResourceWarning", "-v"]
    return run_to_end(warm_server().command("-m", "pytest", str(test), *options))


@BOTH
def test_results_come_in_the_order_of_the_ranks(world):
    """Entry r of what world.run returns is what rank r returned."""
    assert world.run(tells_rank) == list(range(world.size))


@BOTH
def test_every_failing_rank_is_reported_the_cause_before_its_consequences(world):
    """One rank's error fails the case; what it did to the others is told after it."""
    with pytest.raises(RanksFailedError, match="ranks 0, 1 of 2 failed") as caught:
        world.run(fails_on, 1)
    text = str(caught.value)
    assert text.index("ValueError: rank 1 had enough") < text.index("PeerLeftError")


@BOTH
def test_outcomes_tell_of_each_rank_how_it_ended(world):
    """An outcome holds rank, error class and message, of a consequence as well."""
    first, second = world.outcomes(fails_on, 1)
    assert (first.rank, second.rank) == (0, 1)
    assert first.error == "PeerLeftError"
    assert second.error == "ValueError"
    assert second.message == "rank 1 had enough"


@BOTH
def test_a_world_is_as_new_after_a_case_that_failed(world):
    """The next case runs on all ranks, whatever a rank raised in the one before."""
    with pytest.raises(RanksFailedError):
        world.run(fails_on, 0)
    assert world.run(tells_rank) == [0, 1]


@on("mpi-2")
def test_a_rank_that_hangs_is_reported_with_its_stack(world):
    """The pool is ended after the limit, and the report shows where the rank was."""
    world.run(sets_handlers)
    with pytest.raises(ProcessPoolError, match="rank 1 hung") as caught:
        world.outcomes(hangs_on, 1, limit=3.0)
    assert "in hangs_on" in str(caught.value)
    assert "rank 0 ended" in str(caught.value)
    assert world.run(tells_rank) == [0, 1]


@on("mpi-2")
def test_a_rank_that_dies_is_reported(world):
    """A rank that is killed raises ProcessPoolError, and the next case gets a new pool."""
    with pytest.raises(ProcessPoolError, match="rank 0 died"):
        world.run(dies_on, 0)
    assert world.run(tells_rank) == [0, 1]


@on("mpi-2")
def test_a_case_leaves_no_variable_to_the_next(world):
    """An environment variable that a case sets is unset in the next case of that pool."""
    world.run(sets_a_variable)
    assert world.run(sees_the_variable) == [False, False]


@on("mpi-2")
def test_a_result_that_cannot_travel_is_an_error(world):
    """A result that pickle refuses raises RanksFailedError where ranks are processes."""
    with pytest.raises(RanksFailedError, match="cannot pickle"):
        world.run(unpicklable)


@on("mpi-2")
def test_a_function_that_processes_cannot_import_is_refused(world):
    """A lambda as a case raises TypeError, which says where a case must be defined."""
    with pytest.raises(TypeError, match="at the top of its module"):
        world.run(lambda: None)


@pytest.mark.parametrize("transport", ["loopback-2", "mpi-2"], ids=["threads", "processes"])
def test_a_failing_rank_fails_the_test(inner, transport):
    """The law that all tests of several ranks stand on, seen from outside."""
    assert inner.code == pytest.ExitCode.TESTS_FAILED, inner
    assert f"test_failing_rank[{transport}] FAILED" in inner.stdout
    assert "rank 1 of 2 failed" in inner.stdout
    assert "this rank is not the first" in inner.stdout


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("thread", "thread idler"),
        ("process", "child process"),
        ("variable", "environment variable FORGOTTEN"),
    ],
    ids=["thread", "process", "variable"],
)
def test_a_test_that_leaves_something_behind_fails(inner, kind, told):
    """A thread, process or environment variable left is an error at teardown that names it."""
    report = rf"ERROR at teardown of test_leaks_{kind} _+\n+the test has left behind: {told}"
    assert re.search(report, inner.stdout), inner


def test_a_test_that_leaves_nothing_passes(inner):
    """What follows the leaking ones is not blamed for them, nor for a variable of CUDA's."""
    assert "test_clean PASSED" in inner.stdout, inner
    reports = re.findall(r"^the test has left behind", inner.stdout, re.MULTILINE)
    assert len(reports) == 3, inner
    assert inner.left == ()


def test_a_local_world_leaves_nothing_behind():
    """When run() of a world of threads has returned, no thread of it is left."""
    before = Traces.now()
    LoopbackWorld(3).run(tells_rank)
    assert before.left(grace=0.0) == []


def test_a_script_is_run_to_its_end(tmp_path):
    """run_on_mpirun gives exit code, stdout and stderr, and what processes were left."""
    script = "import sys; print('said'); print('cried', file=sys.stderr); sys.exit(5)"
    done = run_on_mpirun(1, script, tmp_path)
    assert (done.code, done.stdout, done.timed_out, done.left) == (5, "said\n", False, ()), done
    assert "cried" in done.stderr


def test_a_script_that_does_not_end_is_ended_with_all_it_started(tmp_path):
    """At its timeout no process of a script is left, and what it printed is kept."""
    script = "import time; print('here', flush=True); time.sleep(300)"
    before = Traces.now()
    for timeout in (2.0, 10.0, 60.0):  # a busy machine needs longer to start it
        done = run_on_mpirun(2, script, tmp_path, timeout=timeout)
        assert done.timed_out, done
        if done.stdout == "here\nhere\n":
            break
    assert done.stdout == "here\nhere\n"
    assert before.left() == []


def test_a_process_that_outlives_its_command_is_told(tmp_path):
    """run_to_end lists a child that runs on, although the command exits with 0."""
    orphan = "import subprocess; subprocess.Popen(['sleep', '30'])"
    done = run_to_end([sys.executable, "-c", orphan])
    assert done.code == 0
    assert [line.partition(": ")[2] for line in done.left] == ["sleep 30"]
