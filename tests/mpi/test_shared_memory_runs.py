"""Runs whose ranks share memory: how they end, what they leave, and where memory cannot be had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support import run_on_mpirun, run_to_end
from tests.support.processes import mpirun, warm_server

AVERAGES = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import asyncddp as bf
from asyncddp import topology

def failing():
    Path(__file__).with_name("failed").write_text(str(time.time()))

bf.init()
transport = bf.current().transport
bf.set_topology(topology.one_peer_exponential(bf.size()))
x = bf.empty_shared((1_000_000,)).fill_(float(bf.rank()))
for _ in range(8):
    bf.neighbor_allreduce_(x, name="x")
mean = (bf.size() - 1) / 2
assert bool((x == mean).all()), x
"""
ON_AND_ON = """
while True:
    bf.neighbor_allreduce_(x, name="x")
"""


def namespaces():
    """Whether this process may have a file system of its own; else why not."""
    if os.geteuid() != 0:
        return "needs root, for a /dev/shm of its own"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "this system gives no mount namespaces"


def run_alone(ranks, script, folder, *, size="1g", options=(), environ=None, warm=True):
    """Run a script with a ``/dev/shm`` of its own; gives how it ended, and what is left there."""
    why_not = namespaces()
    if why_not:
        pytest.skip(why_not)
    path, left = folder / "script.py", folder / "left"
    path.write_text(script, encoding="utf-8")
    inside = (
        f"mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 99; "
        f'"$@"; code=$?; sleep 0.5; ls -A /dev/shm > {left}; exit $code'
    )
    python = warm_server().python if warm else sys.executable
    launcher, *rest = mpirun(ranks, python, str(path))
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", launcher, *options, *rest]
    done = run_to_end(command, environ=environ)
    assert done.code != 99, done
    return done, left.read_text().split() if left.exists() else None


def assert_ended_soon(done, folder):
    assert not done.timed_out, done
    assert done.code != 0, done
    assert done.left == (), done
    failed = float((folder / "failed").read_text())
    assert done.ended - failed < 60, done


@pytest.mark.mpi(4)
def test_a_rank_that_is_killed_between_two_pieces(tmp_path):
    """The run ends soon, names it, and leaves neither a process nor memory."""
    body = """
    def die():
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    if bf.rank() == 1:
        threading.Timer(0.3, die).start()
    """
    script = AVERAGES + textwrap.dedent(body) + ON_AND_ON
    done, left = run_alone(4, script, tmp_path)
    assert_ended_soon(done, tmp_path)
    assert re.search(r"process rank 1 .*exited on\s+signal 9", done.stderr, re.S), done
    assert "Traceback" not in done.stderr, done
    assert left == [], done


@pytest.mark.mpi(2)
def test_survivors_of_a_killed_rank_say_whom_they_miss(tmp_path):
    """Where the launcher lets them live, they raise by the deadline."""
    body = """
    def die():
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    if bf.rank() == 1:
        threading.Timer(0.3, die).start()
    try:
        while True:
            bf.neighbor_allreduce_(x, name="x")
    except bf.PeerError as error:
        print(f"rank {bf.rank()}: {type(error).__name__}: {error}\\n", end="", flush=True)
        time.sleep(0.5)
        os._exit(0)
    """
    done, left = run_alone(
        2,
        AVERAGES + textwrap.dedent(body),
        tmp_path,
        options=["--with-ft", "ulfm"],
        environ={"ASYNCDDP_TIMEOUT": "4"},
    )
    assert not done.timed_out, done
    assert done.left == (), done
    assert done.ended - float((tmp_path / "failed").read_text()) < 60, done
    alone = r"rank 0: (PeerLeftError: .*process has failed|WaitTimeoutError: .*missing: rank 1)"
    assert re.match(alone, done.stdout), done
    assert left == [], done


@pytest.mark.mpi(4)
def test_ctrl_c_in_the_middle_of_averages(tmp_path):
    """The launcher is interrupted, as by a terminal."""
    body = """
    def interrupt():
        failing()
        os.kill(os.getppid(), signal.SIGINT)
    if bf.rank() == 1:
        threading.Timer(0.3, interrupt).start()
    """
    done, left = run_alone(4, AVERAGES + textwrap.dedent(body) + ON_AND_ON, tmp_path, warm=False)
    assert_ended_soon(done, tmp_path)
    assert left == [], done


@pytest.mark.mpi(2)
def test_ctrl_c_that_one_rank_catches(tmp_path):
    """What was under way is ended behind its back, and the name works on."""
    body = """
    interrupted, ended = (Path(__file__).with_name(name) for name in ("interrupted", "ended"))
    def wait_for(path):
        while not path.exists():
            time.sleep(0.01)
    bf.barrier()
    x.fill_(float(bf.rank()))
    try:
        if bf.rank() == 1:
            wait_for(interrupted)
        else:
            threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        bf.neighbor_allreduce_(x, name="x")
        told = "it ended well"
        ended.touch()
    except KeyboardInterrupt:
        told = "interrupted"
        interrupted.touch()
        wait_for(ended)
    print(f"rank {bf.rank()}: {told}\\n", end="", flush=True)
    for k in range(8):
        y = torch.full((1_000_000,), float(bf.rank() + k))
        assert bool((bf.neighbor_allreduce(y, name="x") == mean + k).all()), k
    """
    done, left = run_alone(2, AVERAGES + textwrap.dedent(body), tmp_path)
    assert done.code == 0, done
    assert sorted(done.stdout.split("\n")) == ["", "rank 0: interrupted", "rank 1: it ended well"]
    assert left == [], done


SHARES = """
near = transport.shared_memory_group
channels = bf.current().engine.matcher.channels.find_all("x")
assert near is not None, "no shared memory"
assert near.arena.locate(x) is not None
assert any(channel.send_ring is not None and channel.readers for channel in channels)
assert bool((bf.allreduce(x.clone()) == mean).all())
print(f"{transport.name}\\n", end="", flush=True)
"""


@pytest.mark.mpi(4)
def test_the_size_of_dev_shm_does_not_matter(tmp_path):
    """Containers give 64 KB or so of it; what ranks share is not taken from there.

    MPI's own segments are: they are put elsewhere, as its documentation tells.
    """
    options = ["--mca", "btl_sm_backing_directory", str(tmp_path)]
    done, left = run_alone(4, AVERAGES + SHARES, tmp_path, size="64k", options=options)
    assert done.code == 0, done
    assert done.stdout.split() == ["shared_memory"] * 4
    assert done.stderr == "", done
    assert left == [], done


@pytest.mark.mpi(2)
def test_a_run_that_ends_well_leaves_nothing(tmp_path):
    """The counter-check: with ``shutdown()`` on one rank, and without it on the other."""
    end = "if bf.rank() == 0:\n    bf.shutdown()\n    assert bool((x == mean).all())\n"
    done, left = run_alone(2, AVERAGES + SHARES + end, tmp_path)
    assert (done.code, done.stderr, done.left, left) == (0, "", (), []), done


# where memory cannot be shared

BLIND = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK") in {ranks!r}:
    {act}
"""
ACTS = {
    "no memfd_create": ("del os.memfd_create", "this system has no memfd_create"),
    "no memory": (
        "def refuse(*_):\n        raise OSError(38, 'Function not implemented')\n"
        "    os.memfd_create = refuse",
        "memfd_create: [Errno 38] Function not implemented",
    ),
    "out of sight": (
        "plain = os.open\n"
        "    def refuse(path, *more, **named):\n"
        "        if str(path).startswith('/proc/') and '/fd/' in str(path):\n"
        "            raise PermissionError(13, 'Permission denied')\n"
        "        return plain(path, *more, **named)\n"
        "    os.open = refuse",
        "is out of sight: [Errno 13] Permission denied",
    ),
}
WORKS = """
print(f"{transport.name} {transport.shared_memory_group is None}\\n", end="", flush=True)
y = bf.allreduce(torch.full((100_000,), float(bf.rank())))
assert bool((y == mean).all())
"""


def run_blind(number, act, blind, script, folder, **environ):
    """Run a script on ranks of which some cannot share memory."""
    text = BLIND.format(ranks=blind, act=act) + script
    return run_on_mpirun(number, text, folder, environ=environ)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("ranks", ["1", "01"], ids=["on one rank", "on all"])
@pytest.mark.parametrize("problem", ACTS)
def test_ranks_that_cannot_share_memory_say_so_once_and_go_by_mpi(tmp_path, problem, ranks):
    """One warning for the machine, with the reason; all ranks agree, and results are right."""
    act, why = ACTS[problem]
    done = run_blind(2, act, list(ranks), AVERAGES + WORKS, tmp_path)
    assert done.code == 0, done
    assert done.stdout.split("\n")[:2] == ["shared_memory True"] * 2, done
    told = [line for line in done.stderr.splitlines() if line]
    assert len(told) == 1, done
    assert told[0].startswith("the ranks of this machine cannot share memory ("), done
    assert why in told[0], done
    assert told[0].endswith("they exchange tensors by MPI instead, which is slower"), done


@pytest.mark.mpi(2)
@pytest.mark.parametrize("problem", ACTS)
def test_shared_memory_that_is_asked_for_and_cannot_be_had_is_an_error(tmp_path, problem):
    """It says why, and what to set instead."""
    act, why = ACTS[problem]
    done = run_blind(2, act, ["1"], AVERAGES, tmp_path, ASYNCDDP_TRANSPORT="shared_memory")
    assert not done.timed_out, done
    assert done.code != 0, done
    assert "EnvironmentProblem: transport shared_memory: the ranks of this machine" in done.stderr
    assert f"cannot share memory ({why}" in done.stderr or why in done.stderr, done
    assert "use ASYNCDDP_TRANSPORT=mpi" in done.stderr
    assert done.left == (), done


@pytest.mark.mpi(2)
def test_a_rank_alone_on_its_machine_needs_no_shared_memory(tmp_path):
    """Nothing is warned of where there is nobody to share with."""
    script = "import asyncddp as bf\nbf.init()\nprint(bf.current().transport.shared_memory_group)\n"
    done = run_blind(1, "del os.memfd_create", ["0"], script, tmp_path)
    assert (done.code, done.stdout, done.stderr) == (0, "None\n", ""), done
