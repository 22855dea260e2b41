"""Processes that a rank starts and that call ``init()``: refused, or a run of their own."""

import pytest

from tests.support.processes import warm_server

PARENT = """
import os, subprocess, sys, torch, asyncddp as bf
def say(*words):  # in one piece, since ranks share the output
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
bf.init()
if bf.rank() == 0:
    child = [{python!r}, "child.py"]
    refused = subprocess.run(child, capture_output=True, text=True, timeout=300)
    say("child", refused.returncode, "was started by a rank" in refused.stderr)
    inner = [{launch}, "inner.py"]
    inner = subprocess.run(inner, capture_output=True, text=True, timeout=300)
    say("inner", inner.returncode, inner.stdout.split(), inner.stderr)
say("sum", bf.allreduce(torch.ones(1), average=False).item())
bf.shutdown()
say("marked", "ASYNCDDP_RANK_PROCESS" in os.environ)
"""
INNER = """
import sys, torch, asyncddp as bf
bf.init()
if bf.rank() == 0:
    sys.stdout.write(str(bf.allreduce(torch.ones(1), average=False).item()))
else:
    bf.allreduce(torch.ones(1), average=False)
"""
PLAIN_MPIRUN = (
    "os.path.join(os.path.dirname(sys.executable), 'mpirun'), '-np', '2', '--map-by', "
    "':OVERSUBSCRIBE', '--allow-run-as-root', {python!r}"
)
OURS = (
    "sys.executable, '-m', 'asyncddp', 'run', '-np', '2', '--launcher', 'local', {python!r}, "
    "'-m', 'asyncddp.launch.rank'"
)


@pytest.mark.parametrize(
    ("launcher", "launch"),
    [("local", PLAIN_MPIRUN), ("mpirun", OURS)],
    ids=["mpirun inside", "asyncddp run inside"],
)
def test_a_ranks_child_is_refused_at_once_and_a_run_inside_is_let_in(run, launcher, launch):
    """The run that the rank belongs to goes on."""
    (run.folder / "inner.py").write_text(INNER)
    (run.folder / "child.py").write_text("import asyncddp as bf; bf.init()")
    python = warm_server().python
    text = PARENT.format(launch=launch.format(python=python), python=python)
    ended = run("--launcher", launcher, "-np", "2", *run.warm(text))
    assert ended.code == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "child 1 True",
        "inner 0 ['2.0'] ",
        *["marked False"] * 2,
        *["sum 2.0"] * 2,
    ]
