"""Startup of the world announced by a launcher, with a check that the transport sees all ranks."""

from __future__ import annotations

from asyncddp.config import Config
from asyncddp.context.crash_handler import end_run, joining_marker
from asyncddp.environments.launchers import (
    SlurmEnvironment,
    TorchEnvironment,
    launcher_rank_and_size,
    mpi_launcher,
    torch_world,
)
from asyncddp.errors import EnvironmentProblem
from asyncddp.transport import C10D, DEFAULT_TRANSPORT, Transport
from asyncddp.transport.base import Scope
from asyncddp.transport.selection import can_load, open_transport
from asyncddp.transport.sockets.store_access import default_group_store
from asyncddp.transport.startup_deadline import StartupDeadline

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


def open_world(config: Config) -> Transport:
    """Open the transport between all ranks of this process's world; collective.

    Raises:
        UnknownNameError: No transport has the name that the user has given.
        EnvironmentProblem: Launchers contradict each other, the transport cannot be used here, or
            it knows of another number of ranks than the launcher has announced.
        WaitTimeoutError: Some ranks have not come by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    default = DEFAULT_TRANSPORT if config.transport is not None else select_default_transport()
    deadline = StartupDeadline(*launcher_rank_and_size(), config, end_run)
    with joining_marker(config):
        opened = open_transport(config.transport, deadline, default=default)
    if opened.started_by_mpi:
        check_size(opened.size)
    elif opened.scope is not Scope.PROCESS:
        check_joined(opened.size)
    return opened


def select_default_transport() -> str:
    """Select the transport if the user names none: by the launcher of this process.

    MPI launchers select MPI; torch.distributed launchers, or a process group of several ranks that
    the user has initialised, select ``c10d``. Without a known launcher, a process takes MPI if its
    library can be loaded: an unknown MPI launcher may have started it.

    Raises:
        EnvironmentProblem: Launchers of MPI and of torch.distributed contradict each other, or a
            world of torch.distributed is announced in part.
    """
    launcher, torch = mpi_launcher(), TorchEnvironment()
    # srun may have started a shell, or a torchrun on each node
    inner = isinstance(launcher, SlurmEnvironment) and (launcher.size == 1 or torch.is_elastic)
    if launcher is not None and not inner:
        told = (torch.rank, torch.size)
        if torch.detected and torch.size > 1 and told != (launcher.rank, launcher.size):
            raise EnvironmentProblem(
                f"{launcher}, but {torch.command} as rank {torch.rank} of {torch.size} (RANK, "
                "WORLD_SIZE): the two contradict each other. Start the script by one of them, "
                "'asyncddp run -np N SCRIPT' or 'torchrun --nproc-per-node N SCRIPT', or unset "
                "RANK and WORLD_SIZE"
            )
        return DEFAULT_TRANSPORT
    if default_group_store() is not None or torch_world() is not None:
        return C10D
    return DEFAULT_TRANSPORT if can_load(DEFAULT_TRANSPORT) else C10D


def check_size(size: int) -> None:
    """Raise if the number of ranks started by the launcher differs from MPI's ``size``."""
    launcher, torch = mpi_launcher(), TorchEnvironment()
    if launcher is not None and size == 1 < launcher.size:
        raise EnvironmentProblem(
            f"{launcher}, but the MPI library says that it is alone: the two do not speak to each "
            f"other, and {launcher.size} ranks would each train by themselves. "
            f"{_REMEDIES.get(launcher.command, _REMEDY)}"
        )
    if launcher is not None or not torch.detected or torch.size in (1, size):
        return
    alone = f"this process is alone: {torch.size} ranks would each train by themselves"
    raise EnvironmentProblem(
        f"{torch}, but this transport is MPI's, and {alone if size == 1 else f'MPI knows {size}'}. "
        "Leave ASYNCDDP_TRANSPORT and the argument transport out, or choose c10d, to join that "
        f"world; or start the script by 'asyncddp run -np {torch.size} SCRIPT'"
    )


def check_joined(size: int) -> None:
    """Raise if a transport without MPI found one rank, but an MPI launcher started several."""
    launcher = mpi_launcher()
    if launcher is not None and size == 1 < launcher.size and not TorchEnvironment().is_elastic:
        raise EnvironmentProblem(
            f"{launcher}, but this transport is none of MPI's, and {launcher.size} ranks would "
            "each train by themselves: leave ASYNCDDP_TRANSPORT and the argument transport out, or "
            "for c10d have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as asyncddp run does"
        )
