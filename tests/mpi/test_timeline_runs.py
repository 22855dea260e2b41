"""Timelines of runs: started by the launcher, killed in the middle, and as BlueFog's tests want."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from asyncddp.cli.run_command import timeline_pattern
from asyncddp.launch.job_options import RunOptions
from tests.support import run_on_mpirun, run_to_end
from tests.support.processes import warm_script
from tests.support.timelines import assert_balanced, assert_nested, read, spans

KILLED = """
import os, signal, time
import torch
import asyncddp as bf

bf.init()
x = torch.ones(4)
for k in range(200):
    x = bf.neighbor_allreduce(x, name="x")
time.sleep(0.3)
if bf.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    x = bf.neighbor_allreduce(x, name="x")
"""


@pytest.mark.mpi(2)
def test_a_run_that_is_killed_leaves_files_that_can_be_read(tmp_path):
    """Whole lines up to the end, of the rank that was killed as well."""
    where = {"ASYNCDDP_TIMELINE": f"{tmp_path}/out/"}
    done = run_on_mpirun(2, KILLED, tmp_path, environ=where)
    assert not done.timed_out, done
    assert done.code != 0, done
    for rank in (0, 1):
        events = read(tmp_path / "out" / f"rank{rank}.json", ended=False)
        assert_nested(events)
        assert len(spans(events, "enqueue")) >= 200


BLUEFOG = """
import os, sys, threading, time
import torch
import asyncddp.integrations.bluefog as bf
import asyncddp

bf.init()
file = f"{os.environ['BLUEFOG_TIMELINE']}{bf.rank()}.json"

def has(*texts, within=60.0):
    limit = time.monotonic() + within
    while True:
        with open(file) as opened:
            text = opened.read()
        missing = [one for one in texts if one not in text]
        if not missing:
            return
        assert time.monotonic() < limit, missing
        time.sleep(0.01)

x = torch.full((23, 23), float(bf.rank()))
bf.neighbor_allreduce(x, name="average")
has("MPI_NEIGHBOR_ALLREDUCE", "ENQUEUE_NEIGHBOR_ALLREDUCE")
bf.neighbor_allgather(x, name="gather")
has("MPI_NEIGHBOR_ALLGATHER", "ENQUEUE_NEIGHBOR_ALLGATHER")
bf.win_create(x, "window")
targets = dict.fromkeys(bf.out_neighbor_ranks(), 0.5)
bf.win_accumulate(x, "window", self_weight=0.5, dst_weights=targets)
bf.barrier()
has("MPI_WIN_ACCUMULATE", "ENQUEUE_WIN_ACCUMULATE", within=0.0)
bf.win_free()

def work(name):
    assert bf.timeline_start_activity(name, "FAKE_WORK")
    time.sleep(0.01)
    assert bf.timeline_end_activity(name)

threads = [threading.Thread(target=work, args=(f"row {k}",)) for k in (1, 2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
with bf.timeline_context("inside", activity_name="MORE_WORK"):
    pass
has("FAKE_WORK", "MORE_WORK", '"tid": 1', '"tid": 2')
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bf.DistributedAdaptWithCombineOptimizer(sgd, model)
optimizer.turn_on_timeline()
for k in range(6):
    if k == 4:
        optimizer.turn_off_timeline()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
bf.shutdown()
"""


@pytest.mark.mpi(4)
def test_bluefogs_timeline(tmp_path):
    """What its scripts look for is there soon, while they run; the file is JSON in the end."""
    where = {"BLUEFOG_TIMELINE": f"{tmp_path}/run-"}
    done = run_on_mpirun(4, BLUEFOG, tmp_path, environ=where)
    assert done.code == 0, done
    for rank in range(4):
        events = read(tmp_path / f"run-{rank}.json")
        assert_balanced(events)
        assert_nested(events)
        begun = [event for event in events if event["ph"] == "B"]
        assert [event["name"] for event in begun].count("FAKE_WORK") == 2
        assert len({event["tid"] for event in begun}) == 3
        assert len(spans(events, "step")) == 4
        assert len(spans(events, "forward", "Sequential")) == 4


@pytest.mark.mpi(2)
def test_the_launcher_starts_a_timeline(tmp_path):
    """The folder is made where it is missing; programs may go to another one."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, tempfile
            import asyncddp as bf

            os.chdir(tempfile.gettempdir())
            bf.init()
            bf.barrier()
            """
        )
    )
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "2", "--timeline", "out"]
    done = run_to_end([*command, *warm_script(str(script))], cwd=tmp_path)
    assert done.code == 0, done
    for rank in (0, 1):
        events = read(tmp_path / "out" / f"rank{rank}.json")
        assert spans(events, "enqueue", "ENQUEUE_BARRIER")


def test_a_prefix_in_place_of_a_folder(tmp_path, monkeypatch):
    """Both are absolute for the ranks, and a prefix is one even where a folder has its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert timeline_pattern(RunOptions()) is None
    assert timeline_pattern(RunOptions(timeline=Path("out"))) == f"{tmp_path}/out/rank{{rank}}.json"
    assert timeline_pattern(RunOptions(timeline_filename="out")) == f"{tmp_path}/out{{rank}}.json"


def test_two_places_for_a_timeline_are_one_too_many(tmp_path):
    """One of them is meant."""
    options = ["--timeline", "a", "--timeline-filename", "b"]
    done = run_to_end([sys.executable, "-m", "asyncddp", "run", *options, "x.py"])
    assert done.code != 0, done
    told = "--timeline and --timeline-filename: give one of them, not both."
    assert re.sub(r"\s+", " ", done.stderr).count(told) == 1, done
