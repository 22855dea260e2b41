"""What the launcher says of this rank, beside what the MPI library says."""

from __future__ import annotations

from collections.abc import Mapping

from asyncddp.errors import EnvironmentProblem

__all__ = ["check_size", "launched_as"]

_NAMES = (
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


def launched_as(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and size as the launcher has set them; ``(0, 1)`` where there was none.

    Example:
        >>> launched_as({"PMI_RANK": "1", "PMI_SIZE": "4"})
        (1, 4)
    """
    rank, size, _ = _found(environment)
    return rank, size


def check_size(size: int, environment: Mapping[str, str]) -> None:
    """Refuse to train alone, once for each rank, where several ranks were started.

    Args:
        size: How many ranks the MPI library knows.
        environment: The variables, of which the launcher's are read.

    Raises:
        EnvironmentProblem: The launcher has started several, and the library knows of one.

    Example:
        >>> check_size(1, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
        >>> check_size(4, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"})
    """
    rank, launched, launcher = _found(environment)
    if size == 1 < launched:
        raise EnvironmentProblem(
            f"{launcher} has started this process as rank {rank} of {launched}, but the MPI "
            f"library says that it is alone: the two do not speak to each other, and {launched} "
            f"ranks would each train by themselves. {_REMEDIES.get(launcher, _REMEDY)}"
        )


def _found(environment: Mapping[str, str]) -> tuple[int, int, str]:
    for rank, size, launcher in _NAMES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size]), launcher
    return 0, 1, ""
