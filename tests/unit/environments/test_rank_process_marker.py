"""Processes that a rank starts: which inherit its place, and which have one of their own."""

import os

import pytest

from asyncddp.environments.rank_process_marker import (
    environment_of_children,
    mark_rank,
    refuse_child_of_rank,
)
from asyncddp.errors import EnvironmentProblem
from asyncddp.testing.process_pool import launch

MARKER = "ASYNCDDP_RANK_PROCESS"
MPIRUN = {"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "20000"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}
ANNOUNCEMENTS = pytest.mark.parametrize(
    "announced", [MPIRUN, TORCH, SRUN, {**MPIRUN, **TORCH}], ids=["mpirun", "torch", "srun", "both"]
)


def child_of(announced, pid=None):
    """The environment of a child of a rank, by default of this process's parent."""
    environ = {"PATH": "/bin", **announced}
    mark_rank(environ)
    environ[MARKER] = environ[MARKER].replace(str(os.getpid()), str(pid or os.getppid()), 1)
    return environ


@ANNOUNCEMENTS
def test_a_child_that_inherits_a_ranks_place_is_refused(announced):
    """And its environment stays, so that its own children are refused as well."""
    environ = child_of(announced)
    before = dict(environ)
    with pytest.raises(EnvironmentProblem, match=f"started by a rank .process {os.getppid()}."):
        refuse_child_of_rank(environ)
    assert environ == before


@ANNOUNCEMENTS
def test_the_rank_itself_and_who_outlives_it_are_let_in(announced):
    """An exec keeps the process, and the place of a rank that has gone may be taken."""
    for pid in (os.getpid(), 2**22 + 1):
        environ = child_of(announced, pid)
        before = dict(environ)
        refuse_child_of_rank(environ)
        assert environ == before


@pytest.mark.parametrize(
    ("outer", "added"),
    [
        (MPIRUN | TORCH, {"PMIX_NAMESPACE": "job@2"}),
        (MPIRUN | TORCH, {"MASTER_PORT": "20001"}),
        (TORCH, MPIRUN),
        (SRUN, {"SLURM_STEP_ID": "2"}),
    ],
    ids=["mpirun in mpirun", "torchrun in mpirun", "mpirun in torchrun", "srun in srun"],
)
def test_what_a_launcher_announces_anew_counts_and_all_else_is_dropped(outer, added):
    """Else an inherited RANK would contradict the one that is meant."""
    environ = child_of(outer) | added
    refuse_child_of_rank(environ)
    kept = {name for kind in (MPIRUN, TORCH, SRUN) if kind.keys() & added for name in kind}
    assert environ == {"PATH": "/bin"} | {n: v for n, v in (outer | added).items() if n in kept} | (
        {"SLURM_JOB_ID": "7"} if "SLURM_JOB_ID" in outer else {}
    )


def test_a_launcher_passes_nothing_of_a_rank_on():
    """What the user has set himself stays."""
    environ = child_of(TORCH) | {"MASTER_ADDR": "node7"}
    assert environment_of_children(environ) == {"PATH": "/bin", **TORCH, "MASTER_ADDR": "node7"}
    left = environment_of_children(child_of(TORCH))
    assert left == environment_of_children(left) == {"PATH": "/bin"}


def test_ranks_of_tests_have_a_place_of_their_own(monkeypatch):
    """Also where the tests run on ranks."""
    environ = child_of(TORCH)
    del environ["PATH"]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    _, given = launch(2, "true")
    assert not given.keys() & {MARKER, "RANK", "WORLD_SIZE"}
