"""``init()`` on real ranks: who comes late is named in time, whatever was imported first."""

from __future__ import annotations

import re

import pytest

from tests.support import run_on_mpirun

TOGETHER = """
import os, sys, time
from pathlib import Path

me, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])

def together(name, ranks):
    "Meet by files, since some ranks may take long to import torch."
    Path(__file__).with_name(f"{name}-{me}").touch()
    while not all(Path(__file__).with_name(f"{name}-{r}").exists() for r in ranks):
        time.sleep(0.02)
"""
MIXED = (
    TOGETHER
    + """
if me == 0:
    from mpi4py import MPI
import asyncddp as bf, torch
bf.init()
big = torch.full((40_000,), float(me))
depth = os.environ["OMPI_MCA_pml_ob1_send_pipeline_depth"]
print(bf.allreduce(big).unique().tolist(), depth, flush=True)
from mpi4py import MPI
from asyncddp.transport.mpi.iallreduce_tuning import iallreduce_algorithm
total = MPI.COMM_WORLD.allreduce(1)
print("algorithm", iallreduce_algorithm(), "ranks", total, flush=True)
bf.shutdown()
bf.init()
print("again", bf.size(), flush=True)
"""
)
LATE = (
    TOGETHER
    + """
if MPI_FIRST:
    from mpi4py import MPI
import torch, asyncddp as bf
together("imported", range(size))
if me == 1:
    time.sleep(600)
bf.init()
"""
)
AGAIN = (
    TOGETHER
    + """
from mpi4py import MPI  # has started, so that a deadline can be raised
import torch, asyncddp as bf
if me == 1:
    together("refused", [0])
else:
    try:
        bf.init(timeout=0.5)
    except bf.WaitTimeoutError as error:
        print(f"rank {me} heard {error}", flush=True)
    assert not bf.is_initialized()
    together("refused", [0])
bf.init()
print("sum", bf.allreduce(torch.tensor([1.0 + me]), average=False).item(), flush=True)
"""
)
DIFFERENT = (
    TOGETHER
    + """
if me == 1:
    os.environ["NAME"] = "VALUE"
import asyncddp as bf
try:
    bf.init()
except bf.MismatchError as error:
    print(f"rank {me} heard {error}\\n", end="", flush=True)
    together("heard", range(size))  # else the first to end would end the others
raise SystemExit
"""
)


@pytest.mark.exhaustive
@pytest.mark.mpi(3)
def test_ranks_may_import_mpi4py_in_any_order(tmp_path):
    """What ranks must share is set once all are there; what is their own, before MPI starts."""
    done = run_on_mpirun(3, MIXED, tmp_path, warm=False)
    assert done.code == 0, done
    assert done.stdout.count("[1.0] 64") == 3, done
    assert done.stdout.count("algorithm 3 ranks 3") == 3, done
    assert done.stdout.count("again 3") == 3, done


@pytest.mark.mpi(3)
@pytest.mark.parametrize("mpi_first", [False, True], ids=["before MPI", "after MPI"])
def test_a_rank_that_never_calls_init_is_named_in_time(tmp_path, mpi_first):
    """First a warning on each waiting rank, then an error, also while MPI itself still waits."""
    settings = {"ASYNCDDP_TIMEOUT": "4", "ASYNCDDP_WARN_AFTER": "2"}
    script = LATE.replace("MPI_FIRST", str(mpi_first))
    done = run_on_mpirun(3, script, tmp_path, environ=settings)
    assert not done.timed_out, done
    assert done.code != 0, done
    for rank in (0, 2):
        warning = rf"rank {rank}: init\(\) has been waiting for \d s; missing: rank 1$"
        assert len(re.findall(warning, done.stderr, re.M)) == 1, done
    error = (
        r"rank (\d): init\(\) was not done in \d+\.\d s \(ASYNCDDP_TIMEOUT=4\); missing: rank 1$"
    )
    head = rf"\[asyncddp\] rank (\d) of 3 failed: WaitTimeoutError: {error}"
    found = re.search(head, done.stderr, re.M)
    assert found, done
    assert found[1] == found[2], done
    assert done.left == (), done


@pytest.mark.mpi(2)
def test_init_may_be_called_again_after_its_deadline(tmp_path):
    """A second ``init()`` joins the world once the rank that was missing has come."""
    done = run_on_mpirun(2, AGAIN, tmp_path)
    assert not done.timed_out, done
    assert done.code == 0, done
    error = r"^rank 0 heard rank 0: init\(\) was not done in [\d.]+ s \(ASYNCDDP_TIMEOUT=0\.5\); "
    assert re.search(error + "missing: rank 1$", done.stdout, re.MULTILINE), done
    assert done.stdout.count("sum 3.0") == 2, done


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ASYNCDDP_RANKS_PER_MACHINE", "1", "is None on rank 0 and 1 on rank 1"),
        ("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "ring", "is 0 on rank 0 and 1 on rank 1"),
    ],
    ids=["ours", "MPI's"],
)
def test_settings_that_differ_between_ranks_are_told_on_all(tmp_path, name, value, told):
    """They would hang in the middle of the first collective that depends on them."""
    script = DIFFERENT.replace("NAME", name).replace("VALUE", value)
    done = run_on_mpirun(2, script, tmp_path)
    assert not done.timed_out, done
    for rank in (0, 1):
        expected = f"rank {rank} heard rank {rank}: init(): all ranks need the same settings, but"
        assert f"{expected} {name} {told}; set it alike" in done.stdout, done
