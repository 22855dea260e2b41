"""How runs under ``mpirun`` end when a rank fails inside ``join``: soon, and with the reason."""

from __future__ import annotations

import re

import pytest

from tests.support import run_on_mpirun

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
import asyncddp as bf

bf.init()
model = torch.nn.Linear(4, 2)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bf.DistributedOptimizer(plain, model, "{method}")
with bf.join(optimizer):
    for step in range(2 + 1_000_000 * (bf.rank() > 0)):
        if (bf.rank(), step) == (1, 20):
            Path(__file__).with_name("failed").write_text(str(time.time()))
            {failure}
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
"""


def run_failing(folder, failure, method):
    """Rank 0 is done, rank 1 fails, the others train; all end within 10 s of that."""
    script = SCRIPT.format(failure=failure, method=method)
    done = run_on_mpirun(4, script, folder)
    assert not done.timed_out, done
    assert done.code != 0, done
    assert done.left == (), done
    assert done.ended - float((folder / "failed").read_text()) < 10, done
    return done


@pytest.mark.mpi(4)
@pytest.mark.parametrize("method", ["adapt_with_combine", "gradient_allreduce"])
def test_a_rank_that_raises_in_the_block(tmp_path, method):
    """Its error is told, alone; a rank that is done does not wait for it."""
    done = run_failing(tmp_path, "raise ValueError('the data is gone')", method)
    told = [line for line in done.stderr.splitlines() if line]
    assert told[0] == "[asyncddp] rank 1 of 4 failed: ValueError: the data is gone", done
    assert done.stderr.count("Traceback") == 1, done


@pytest.mark.mpi(4)
def test_a_rank_that_is_killed_in_the_block(tmp_path):
    """The ranks that train and the one that is done end with it."""
    done = run_failing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "adapt_with_combine")
    assert re.search(r"process rank 1 .*exited on\s+signal 9", done.stderr, re.S), done
