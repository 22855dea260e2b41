"""A rank that is killed while it saves leaves the former checkpoints as they were."""

from __future__ import annotations

import logging

import pytest
import torch

import asyncddp as bf
from tests.support import LoopbackWorld, run_on_mpirun

SCRIPT = """
import os, signal
import torch
import asyncddp as bf

def killed(content, stream):
    save(content, stream)
    stream.truncate(stream.tell() // 2)
    os.kill(os.getpid(), signal.SIGKILL)

bf.init()
model = torch.nn.Linear(4, 4)
torch.nn.init.constant_(model.weight, 1.0)
folder = os.path.join(os.path.dirname(__file__), "checkpoints")
bf.save_checkpoint(folder, model, step=1, extra=bf.rank(), replicas="all")
torch.nn.init.constant_(model.weight, 2.0)
save = torch.save
if bf.rank() == 1:
    torch.save = killed  # a kill has to come in the middle of a file
bf.save_checkpoint(folder, model, step=STEP, replicas="all")
"""


def loaded(folder):
    model = torch.nn.Linear(4, 4)
    found = bf.load_checkpoint(folder, model)
    return found.step, model.weight[0, 0].item(), found.extra


@pytest.mark.mpi(2)
@pytest.mark.parametrize("step", [2, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_file(step, tmp_path, caplog):
    """The former one is loaded, also where its own step was being saved again."""
    done = run_on_mpirun(2, SCRIPT.replace("STEP", str(step)), tmp_path)
    assert not done.timed_out, done
    assert done.code != 0, done
    folder = tmp_path / "checkpoints"
    assert [one.suffix for one in folder.rglob("*") if ".part" in one.name] == [".part"]
    with caplog.at_level(logging.WARNING, "asyncddp"):
        assert LoopbackWorld(2).run(loaded, folder) == [(1, 1.0, 0), (1, 1.0, 1)]
    warned = [one.getMessage() for one in caplog.records]
    assert len(warned) == (step == 2), warned
    assert all("step_0000000002 is skipped: it is half-written" in one for one in warned)
