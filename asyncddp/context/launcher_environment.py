"""Reading of rank and world size from the launcher's environment, and checks against MPI."""

from __future__ import annotations

from collections.abc import Mapping

from asyncddp.errors import EnvironmentProblem

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


def check_launchers(environment: Mapping[str, str]) -> None:
    """Raise, before MPI is started, if launchers of MPI and of torch.distributed disagree."""
    rank, size, launcher = _mpi_rank_size_launcher(environment)
    torch_rank, torch_size = _torch_rank_and_size(environment)
    elastic = "TORCHELASTIC_RUN_ID" in environment
    if elastic and not launcher:
        check_size(1, environment)
    if not launcher or torch_size == 1 or (torch_size == size and not elastic):
        return
    if (torch_rank, torch_size) != (rank, size):
        raise EnvironmentProblem(
            f"{launcher} has started this process as rank {rank} of {size}, but "
            f"{_torch_launcher(environment)} as rank {torch_rank} of {torch_size} (RANK, "
            "WORLD_SIZE): the two contradict each other. Start the script by one of them, "
            "'asyncddp run -np N SCRIPT', or unset RANK and WORLD_SIZE"
        )


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
        f"{_torch_launcher(environment)} has started this process as rank {rank} of {launched}, "
        f"but ranks are started by MPI here, and {alone if size == 1 else f'MPI knows {size}'}. "
        "Worlds of torch.distributed cannot be joined yet: start the script by 'asyncddp run -np "
        f"{launched} SCRIPT' instead, with -H h1:2,h2:2 on several machines; or unset RANK and "
        "WORLD_SIZE"
    )


def _torch_launcher(environment: Mapping[str, str]) -> str:
    if any(name.startswith("ACCELERATE_") for name in environment):
        return "accelerate launch"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher of PyTorch"


def _torch_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and size of torch.distributed's world, as for init_method="env://"."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


def _mpi_rank_size_launcher(environment: Mapping[str, str]) -> tuple[int, int, str]:
    for rank, size, launcher in _LAUNCHER_VARIABLES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size]), launcher
    return 0, 1, ""
