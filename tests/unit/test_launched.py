"""A rank that the MPI library takes for the only one, though the launcher started several."""

import os
import subprocess
import sys

import pytest

from asyncddp.context.launched import check_size, launched_as
from asyncddp.errors import EnvironmentProblem

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [(OPEN_MPI, (2, 4)), (HYDRA, (1, 3)), (SRUN, (1, 2)), (BATCH_SCRIPT, (0, 1)), ({}, (0, 1))],
)
def test_rank_and_size_are_the_launchers(environment, expected):
    assert launched_as(environment) == expected


def test_an_mpirun_inside_a_step_of_slurm_comes_first():
    """mpirun starts its daemons by srun, whose variables their ranks inherit."""
    assert launched_as({**SRUN, **OPEN_MPI}) == (2, 4)
    check_size(1, {**SRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (OPEN_MPI, ["mpirun", "rank 2 of 4", "another MPI library's", "asyncddp doctor"]),
        (HYDRA, ["mpiexec", "rank 1 of 3", "another MPI library's"]),
        (SRUN, ["srun", "rank 1 of 2", "srun --mpi=pmix", "srun --mpi=list"]),
    ],
)
def test_a_rank_that_is_alone_among_several_is_told_why(environment, words):
    with pytest.raises(EnvironmentProblem) as caught:
        check_size(1, environment)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, SRUN, BATCH_SCRIPT, {}])
def test_several_ranks_and_a_script_by_itself_are_left_alone(environment):
    check_size(4, environment)
    check_size(1, {} if environment is not BATCH_SCRIPT else environment)


def test_init_refuses_to_train_alone_under_another_launcher():
    """A real MPI library, which knows of one rank, in a process that srun counts among two."""
    done = subprocess.run(
        [sys.executable, "-c", "import asyncddp; asyncddp.init()"],
        env={**os.environ, **SRUN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "EnvironmentProblem: srun has started this process as rank 1 of 2" in done.stderr
