"""Processes that have imported torch before a rank dies, and take its place at once."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

REPLACED = """
import os, signal, sys
imported = "torch" in sys.modules
import asyncddp as bf
import torch

bf.init()
words = sys.argv[1:], sys.stdin.read()
model = torch.nn.Linear(1, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bf.DistributedOptimizer(sgd, model, algorithm="adapt_then_combine")
state = bf.ElasticState(model, optimizer)
for step in state.steps(10**6):
    if bf.rank() == 1 and not state.joined and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    if bf.view().joined:
        break
sys.stdout.write(f"{bf.rank()} of {bf.size()} joined={state.joined} {imported} {words}\\n")
"""

IDLE = "import asyncddp as bf\nbf.init()\nbf.barrier()\nprint('trained')\n"
WAITS = (
    "import asyncddp as bf\nbf.init()\nprint('begun', flush=True)\nbf.barrier()\nwhile True: 1\n"
)


def are_there(*words):
    """Whether a process has these words in its command line."""
    lines = (one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"]))
    return any(set(words) <= set(line) for line in lines)


def test_a_spare_that_has_imported_torch_takes_the_place_of_a_dead_rank(run):
    """Its script begins with torch there, with its arguments, and with empty standard input."""
    script = run.script(REPLACED)
    ended = run("--elastic", "--restarts", "1", "--spares", "1", "-np", "3", script, "a", "-b")
    assert ended.code == 0, ended
    words = (["a", "-b"], "")
    expected = [f"{rank} of 3 joined={rank == 1} {rank == 1} {words}" for rank in range(3)]
    assert sorted(ended.stdout.splitlines()) == expected, ended.stderr
    assert run.wait_until_gone(20) == []


def test_spares_that_nobody_needs_end_with_the_run(run):
    """Nothing is left of them, and the run says nothing of them."""
    script = run.script(IDLE)
    ended = run("--elastic", "--restarts", "3", "--spares", "2", "-np", "2", script)
    assert (ended.code, ended.stdout) == (0, "trained\n" * 2), ended
    assert ended.stderr == "", ended.stderr
    assert run.wait_until_gone(20) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_spares_end_with_their_launcher(run, number):
    """However that ends, also where it cannot tell them."""
    script = run.script(WAITS)
    child = run.start("--elastic", "--restarts", "1", "--spares", "1", "-np", "2", script)
    assert child.stdout.readline() == "begun\n"
    while not are_there("asyncddp.checkpoint.spare_process", script):
        time.sleep(0.02)
    child.send_signal(number)
    run.finish(child)
    assert run.wait_until_gone(20) == []
