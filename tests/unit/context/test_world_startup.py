"""Whose world a rank is of: MPI's or torch.distributed's, and contradictions between the two."""

import os
import subprocess
from unittest import mock

import pytest

from asyncddp.context.world_startup import check_joined, check_size, select_default_transport
from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.errors import EnvironmentProblem
from tests.support import RUN_LIMIT
from tests.support.processes import warm_server

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
ENV_URL = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
TORCHRUN = {**ENV_URL, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


def under(environment):
    """Let this process see only these variables inside a ``with`` block."""
    return mock.patch.dict(os.environ, environment, clear=True)


def test_an_mpirun_inside_a_step_of_slurm_comes_first():
    """mpirun starts its daemons by srun, whose variables their ranks inherit."""
    with under({**SRUN, **OPEN_MPI}):
        assert launcher_rank_and_size() == (2, 4)
    with under({**SRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}):
        check_size(1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (OPEN_MPI, ["mpirun", "rank 2 of 4", "another MPI library's", "asyncddp doctor"]),
        (HYDRA, ["mpiexec", "rank 1 of 3", "another MPI library's"]),
        (SRUN, ["srun", "rank 1 of 2", "srun --mpi=pmix", "srun --mpi=list"]),
        (TORCHRUN, ["torchrun has started", "rank 1 of 3", "or choose c10d"]),
        (ENV_URL, ["a launcher of PyTorch has started", "rank 1 of 3", "asyncddp run -np 3"]),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, ["accelerate launch has", "1 of 3"]),
    ],
)
def test_a_rank_that_is_alone_among_several_is_told_why(environment, words):
    """One MPI rank among several of a launcher is an error with the launcher and a remedy."""
    with under(environment), pytest.raises(EnvironmentProblem) as caught:
        check_size(1)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, SRUN, BATCH_SCRIPT, {}])
def test_several_ranks_and_a_script_by_itself_are_left_alone(environment):
    """Several MPI ranks pass under any MPI launcher, one rank passes without a launcher."""
    with under(environment):
        check_size(4)
    with under({} if environment is not BATCH_SCRIPT else environment):
        check_size(1)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (OPEN_MPI, ENV_URL, ["mpirun", "rank 2 of 4", "a launcher of PyTorch as rank 1 of 3"]),
        (OPEN_MPI, TORCHRUN, ["mpirun", "rank 2 of 4", "torchrun as rank 1 of 3"]),
        (HYDRA, {**TORCHRUN, "RANK": "2"}, ["mpiexec", "1 of 3", "torchrun as rank 2 of 3"]),
        (dict.fromkeys(OPEN_MPI, "1"), ENV_URL, ["rank 1 of 1", "rank 1 of 3"]),
    ],
)
def test_two_launchers_that_contradict_each_other_are_both_named(ours, theirs, words):
    """If MPI's and PyTorch's launchers disagree on rank or size, both are named."""
    with under({**ours, **theirs}), pytest.raises(EnvironmentProblem) as caught:
        select_default_transport()
    message = str(caught.value)
    assert [word for word in [*words, "unset RANK and WORLD_SIZE"] if word not in message] == []


@pytest.mark.parametrize("ours", [OPEN_MPI, HYDRA, SRUN])
@pytest.mark.parametrize("theirs", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "9"}])
def test_what_asyncddp_run_sets_and_worlds_of_one_contradict_nobody(ours, theirs):
    """Under a launcher of MPI, PyTorch's variables that agree, or are incomplete, are no error."""
    rank, size = launcher_rank_and_size(ours)
    alike = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    for environment in ({**ours, **theirs}, {**ours, **alike}):
        with under(environment):
            assert select_default_transport() == "shared_memory"
            check_size(size)


@pytest.mark.parametrize(
    "environment", [TORCHRUN, ENV_URL, {**SRUN, **TORCHRUN}, {"RANK": "0", "WORLD_SIZE": "1"}]
)
def test_a_world_of_torch_distributed_is_joined(environment):
    """Under torchrun, also where srun starts one on each node, the transport is c10d."""
    with under(environment):
        assert select_default_transport() == "c10d"


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, SRUN])
def test_ranks_of_mpi_that_c10d_would_leave_alone_are_told_why(environment):
    """c10d was asked for under a launcher of MPI, which sets none of its variables."""
    with under(environment):
        with pytest.raises(EnvironmentProblem, match=r"as rank .* MASTER_ADDR"):
            check_joined(1)
        check_joined(4)
    for others in ({}, {**SRUN, **TORCHRUN}):
        with under(others):
            check_joined(1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": None}, ["WORLD_SIZE=3", "RANK is not set", "torchrun --nproc-per-node"]),
        ({"WORLD_SIZE": None}, ["RANK=1", "WORLD_SIZE is not set", "unset RANK"]),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["MASTER_ADDR and MASTER_PORT are not set"]),
        ({"RANK": "3"}, ["RANK=3 and WORLD_SIZE=3", "0 <= RANK < WORLD_SIZE"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE='two'", "expected a number"]),
    ],
)
def test_a_world_that_is_announced_in_part_is_refused(changed, words):
    """What is missing to join the announced ranks is named, with what sets it."""
    environment = {**ENV_URL, **{name: text for name, text in changed.items() if text}}
    for name in [name for name, text in changed.items() if text is None]:
        del environment[name]
    with under(environment), pytest.raises(EnvironmentProblem) as caught:
        select_default_transport()
    assert [word for word in words if word not in str(caught.value)] == []


def test_ranks_of_a_launcher_that_is_not_known_are_believed_where_sizes_agree():
    """PyTorch's variables pass if MPI's size is the same, and raise if it differs."""
    with under(ENV_URL):
        check_size(3)
        with pytest.raises(EnvironmentProblem, match=r"rank 1 of 3, but .* MPI knows 2"):
            check_size(2)


@pytest.mark.launches
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_init_refuses_to_train_alone_under_another_launcher(transport):
    """A transport that knows of one rank, in a process that srun counts among two."""
    done = subprocess.run(
        [warm_server().python, "-c", "import asyncddp; asyncddp.init()"],
        env={**os.environ, **SRUN, "ASYNCDDP_TRANSPORT": transport},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT,
        check=False,
    )
    assert done.returncode != 0
    assert "EnvironmentProblem: srun has started this process as rank 1 of 2" in done.stderr
