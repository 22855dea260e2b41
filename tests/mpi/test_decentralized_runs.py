"""Whole runs with DecentralizedDataParallel under ``mpirun``: how they end."""

from __future__ import annotations

import textwrap

import pytest

from tests.support import run_on_mpirun

HEAD = """
import os, signal, time
from pathlib import Path
import torch
import asyncddp as bf

bf.init()
torch.manual_seed(bf.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.01)

def step():
    (ddp(torch.randn(4, 8)) - 1.0).square().mean().backward()
"""


def run(folder, body, ranks, **environ):
    script = HEAD + textwrap.dedent(body)
    return run_on_mpirun(ranks, script, folder, environ=environ)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("sync", "dropped"), [(True, False), (True, True), (False, False)])
def test_a_run_that_just_ends(tmp_path, sync, dropped):
    """Messages and windows that nobody has closed are no error; nothing is printed or left."""
    body = f"""
    ddp = bf.DecentralizedDataParallel(model, sgd, sync={sync})
    for _ in range(20):
        step()
    if {dropped}:
        del ddp
    """
    done = run(tmp_path, body, 2)
    assert (done.code, done.stdout, done.stderr, done.left) == (0, "", "", ()), done


@pytest.mark.mpi(2)
def test_a_rank_that_ends_early(tmp_path):
    """The others hear of it in their backward pass; without waiting for each other they go on."""
    body = """
    for sync in (False, True):
        ddp = bf.DecentralizedDataParallel(model, sgd, sync=sync)
        step()
        if bf.rank() == 1 and sync:
            raise SystemExit
        for _ in range(10):
            step()
        if not sync:
            bf.barrier()
    """
    done = run(tmp_path, body, 2)
    assert done.code != 0, done
    assert "rank 1 has left (its script has ended), but is needed" in done.stderr, done
    assert done.left == (), done


@pytest.mark.mpi(4)
def test_a_straggler_holds_nobody_up(tmp_path):
    """Three ranks make their steps while the fourth waits; the average is formed in the end."""
    body = """
    from pathlib import Path
    ddp = bf.DecentralizedDataParallel(model, sgd, sync=False)
    step()
    bf.barrier()
    through = [Path(__file__).with_name(f"through {rank}") for rank in range(3)]
    for count in range(20):
        while (bf.rank(), count) == (3, 5) and not all(map(Path.exists, through)):
            time.sleep(0.01)
        step()
    if bf.rank() < 3:
        through[bf.rank()].touch()
    ddp.global_avg()
    assert bf.consensus_distance(model) < 1e-5
    ddp.close()
    """
    done = run(tmp_path, body, 4)
    assert (done.code, done.stderr, done.left) == (0, "", ()), done


@pytest.mark.mpi(2)
def test_a_rank_that_never_comes(tmp_path):
    """In step with the neighbours the deadline ends the wait; asynchronous ranks go on."""
    body = """
    free = bf.DecentralizedDataParallel(model, sgd, sync=False)
    held = bf.DecentralizedDataParallel(torch.nn.Linear(8, 1), sgd)
    for ddp in (free, held):
        step()
    if bf.rank() == 1:
        time.sleep(60)
    for ddp in (free, held):
        for _ in range(5):
            step()
        print(f"{ddp.steps} steps\\n", end="", flush=True)
    """
    done = run(tmp_path, body, 2, ASYNCDDP_TIMEOUT="2", ASYNCDDP_WARN_AFTER="1")
    assert done.code != 0, done
    assert done.left == (), done
    assert done.stdout == "6 steps\n", done
    told = (
        "WaitTimeoutError: rank 0: neighbor_allreduce 'DecentralizedDataParallel1.bucket0' (use 2)"
    )
    assert told in done.stderr, done
    assert "missing: rank 1" in done.stderr
    assert "in backward" in done.stderr
