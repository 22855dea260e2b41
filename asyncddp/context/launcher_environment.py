"""Reading of rank and world size from the launcher's environment, and checks against MPI."""

from __future__ import annotations

from collections.abc import Mapping

from asyncddp.errors import EnvironmentProblem
from asyncddp.transport import C10D, DEFAULT_TRANSPORT
from asyncddp.transport.c10d.announced_world import default_group_store, read_world, torch_launcher
from asyncddp.transport.selection import can_load

_LAUNCHER_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "mpiexec"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun"),
)
_REMEDIES = {
    "srun": (
        "Choose what this MPI library speaks, as srun --mpi=pmix (srun --mpi=list shows what there "
        "is), or start the script by asyncddp run with the library's own mpirun"
    )
}
_REMEDY = (
    "The launcher is another MPI library's: take the one that belongs to the library behind "
    "mpi4py, which asyncddp doctor shows"
)


def launcher_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and size from the launcher's environment; ``(0, 1)`` if there is no launcher.

    Example:
        >>> launcher_rank_and_size({"PMI_RANK": "1", "PMI_SIZE": "4"})
        (1, 4)
        >>> launcher_rank_and_size({"RANK": "1", "WORLD_SIZE": "4"})
        (1, 4)
    """
    rank, size, launcher = _mpi_rank_size_launcher(environment)
    if not launcher or "TORCHELASTIC_RUN_ID" in environment:
        return _torch_rank_and_size(environment)
    return rank, size


def select_default_transport(environment: Mapping[str, str]) -> str:
    """Select the transport where the user names none: that of the launcher of this process.

    It is that of MPI under a launcher of MPI, and ``c10d`` under one of torch.distributed, or where
    the user has initialised a process group of several ranks. A process by itself takes MPI if a
    library can be loaded, so that one that an unknown launcher of MPI has started is not alone.

    Raises:
        EnvironmentProblem: Launchers of MPI and of torch.distributed contradict each other, or a
            world of torch.distributed is announced in part.
    """
    rank, size, launcher = _mpi_rank_size_launcher(environment)
    # srun may have started a shell, or a torchrun on each node
    inner = launcher == "srun" and (size == 1 or "TORCHELASTIC_RUN_ID" in environment)
    if launcher and not inner:
        torch_rank, torch_size = _torch_rank_and_size(environment)
        if torch_size > 1 and (torch_rank, torch_size) != (rank, size):
            raise EnvironmentProblem(
                f"{launcher} has started this process as rank {rank} of {size}, but "
                f"{torch_launcher(environment)} as rank {torch_rank} of {torch_size} (RANK, "
                "WORLD_SIZE): the two contradict each other. Start the script by one of them, "
                "'asyncddp run -np N SCRIPT' or 'torchrun --nproc-per-node N SCRIPT', or unset "
                "RANK and WORLD_SIZE"
            )
        return DEFAULT_TRANSPORT
    if default_group_store() is not None or read_world(environment) is not None:
        return C10D
    return DEFAULT_TRANSPORT if can_load(DEFAULT_TRANSPORT) else C10D


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Raise if a launcher has started several ranks, but MPI's ``size`` is another number."""
    rank, launched, launcher = _mpi_rank_size_launcher(environment)
    if size == 1 < launched:
        raise EnvironmentProblem(
            f"{launcher} has started this process as rank {rank} of {launched}, but the MPI "
            f"library says that it is alone: the two do not speak to each other, and {launched} "
            f"ranks would each train by themselves. {_REMEDIES.get(launcher, _REMEDY)}"
        )
    rank, launched = _torch_rank_and_size(environment)
    if launcher or launched in (1, size):
        return
    alone = f"this process is alone: {launched} ranks would each train by themselves"
    raise EnvironmentProblem(
        f"{torch_launcher(environment)} has started this process as rank {rank} of {launched}, "
        f"but this transport is MPI's, and {alone if size == 1 else f'MPI knows {size}'}. Leave "
        "ASYNCDDP_TRANSPORT and the argument transport out, or choose c10d, to join that world; "
        f"or start the script by 'asyncddp run -np {launched} SCRIPT'"
    )


def check_joined(size: int, environment: Mapping[str, str]) -> None:
    """Raise if a transport without MPI found one rank where a launcher of MPI started several."""
    rank, launched, launcher = _mpi_rank_size_launcher(environment)
    if size == 1 < launched and "TORCHELASTIC_RUN_ID" not in environment:
        raise EnvironmentProblem(
            f"{launcher} has started this process as rank {rank} of {launched}, but this transport "
            f"is none of MPI's, and {launched} ranks would each train by themselves: leave "
            "ASYNCDDP_TRANSPORT and the argument transport out, or for c10d have RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT set, as asyncddp run does"
        )


def _torch_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and size of torch.distributed's world, as for init_method="env://"."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def _mpi_rank_size_launcher(environment: Mapping[str, str]) -> tuple[int, int, str]:
    for rank, size, launcher in _LAUNCHER_VARIABLES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size]), launcher
    return 0, 1, ""
