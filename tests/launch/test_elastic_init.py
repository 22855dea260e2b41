"""``bf.init()`` in an elastic run: what a rank tells the others, and who is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import RUN_LIMIT
from tests.support.processes import environment, mpirun, warm_server

ALONE = """
import os, time, torch, asyncddp as bf
bf.init()
assert bf.current().config.elastic and bf.current().transport.name == "c10d"
if bf.rank() == 1:
    {act}
end = time.monotonic() + 60
while not bf.current().transport.failed_peers() and time.monotonic() < end:
    bf.current().transport.poll()
    time.sleep(0.01)
print(bf.current().transport.failed_peers()[1], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("raise ValueError('no data')", "it has ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", "its process has ended"),
    ],
)
def test_peers_learn_that_a_rank_has_left_and_go_on(run, act, told):
    """The library's crash handler tells them, and ends its own process alone."""
    ended = run("--elastic", "-np", "3", *run.warm(ALONE.format(act=act)))
    assert ended.code == 0, ended.stderr
    assert [line[: len(told)] for line in ended.stdout.splitlines()] == [told] * 2
    assert ended.stderr.count("Traceback (most recent call last)") == ("raise" in act)
    assert ended.stderr.splitlines()[-1].startswith("asyncddp: 2 of 3 ranks ended with exit code 0")


# one write, since lines of two would mix where Python does not buffer
INIT = """
import sys
import asyncddp as bf
bf.init(elastic=True)
sys.stdout.write(f"{bf.size()}\\n")
"""


@pytest.mark.parametrize("variables", [{}, {"ASYNCDDP_TRANSPORT": "c10d"}], ids=["mpi", "c10d"])
def test_init_refuses_launchers_of_mpi(tmp_path, variables):
    """mpirun ends all ranks itself, whatever the transport."""
    script = tmp_path / "script.py"
    script.write_text(INIT)
    done = subprocess.run(
        mpirun(2, warm_server().python, str(script)),
        env=environment(variables), capture_output=True, text=True, timeout=RUN_LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert "EnvironmentProblem: init(): elastic: mpirun has started this process" in done.stderr
    assert "Start the script by 'asyncddp run --elastic -np N SCRIPT'" in done.stderr


def test_init_refuses_another_transport_than_that_which_goes_on(run):
    """The rank's own argument is refused as that of the command is."""
    text = "import asyncddp as bf\nbf.init(transport='mpi')\n"
    ended = run("--elastic", "-np", "2", *run.warm(text))
    assert ended.code == 1
    assert "ArgumentError: init(): transport: expected 'c10d' in an elastic run, got 'mpi'" in (
        ended.stderr
    )


def test_init_warns_once_of_a_launcher_that_ends_the_others(run):
    """A warning of one rank says which command lets them go on; that command brings none."""
    ended = run("--launcher", "local", "-np", "2", *run.warm(INIT))
    warned = "elastic: where a rank dies, asyncddp run without --elastic ends the other ranks"
    assert (ended.code, ended.stdout) == (0, "2\n2\n")
    assert ended.stderr.count(warned) == 1
    assert run("--elastic", "-np", "2", *run.warm(INIT)).stderr == ""


def test_init_warns_of_torchrun(tmp_path):
    """Its agent ends the other workers of its machine."""
    script = tmp_path / "script.py"
    script.write_text(INIT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=RUN_LIMIT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
    assert done.stderr.count("elastic: where a rank dies, torchrun ends the other ranks") == 1
