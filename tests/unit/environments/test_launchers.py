"""What each launcher announces: rank, size and place of a process, and where the others are."""

import pytest

from asyncddp.environments.launchers import (
    LAUNCHERS,
    TORCH_VARIABLES,
    SlurmEnvironment,
    announced,
    launcher_rank_and_size,
    ranks_of_one_machine,
    set_torch_variables,
    without_launchers,
)

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
ENV_URL = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
TORCHRUN = {**ENV_URL, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI, (2, 4)),
        (HYDRA, (1, 3)),
        (SRUN, (1, 2)),
        (BATCH_SCRIPT, (0, 1)),
        ({}, (0, 1)),
        (TORCHRUN, (1, 3)),
        ({**SRUN, **TORCHRUN}, (1, 3)),
        (ENV_URL, (1, 3)),
    ],
)
def test_rank_and_size_are_the_launchers(environment, expected):
    """Rank and size are those of MPI's, Slurm's or PyTorch's launcher, (0, 1) without one."""
    assert launcher_rank_and_size(environment) == expected


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, None),
        ({"PMIX_RANK": "0"}, None),
    ],
)
def test_ranks_are_on_one_machine_only_where_the_launcher_says_so(environment, ranks):
    """Their number is known if launcher variables put all ranks on one machine, else None."""
    assert ranks_of_one_machine(environment) == ranks


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_what_a_launcher_announces_is_told_in_torchs_names(kind):
    """Each fact that it declares, unless the user has set one of torch's variables."""
    environ = {name: str(number) for number, name in enumerate(kind.variables.values())}
    for fact, name in kind.variables.items():
        assert announced(fact, environ) == environ[name]
        assert announced(fact, {}) is None
    set_torch_variables(environ)
    told = {fact: environ[fact] for fact in TORCH_VARIABLES if fact in environ}
    assert told == {fact: environ[name] for fact, name in kind.variables.items()}
    chosen = {**environ, "RANK": "7"}
    set_torch_variables(chosen)
    assert chosen["RANK"] == "7"


def test_a_launcher_of_its_own_drops_the_announcements_of_those_around_it():
    """The address that the user has chosen stays."""
    around = {**OPEN_MPI, **HYDRA, **SRUN, **TORCHRUN, "PMIX_NAMESPACE": "job@1"}
    assert without_launchers({**around, "PATH": "/bin"}) == {
        "PATH": "/bin", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[07-12,15]", "node07"), ("a,b", "a"), ("gpu[3,5]-ib", "gpu3-ib"), ("alone", "alone")],
)
def test_the_first_host_of_an_allocation_is_its_address(nodes, first):
    """From Slurm's list of nodes, in which a bracket stands for several."""
    assert SlurmEnvironment({"SLURM_JOB_NODELIST": nodes}).address == first
