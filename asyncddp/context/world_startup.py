"""Startup of the world announced by a launcher, with a check that the transport sees all ranks."""

from __future__ import annotations

import logging
from pathlib import Path

from asyncddp.config import Config
from asyncddp.context.crash_handler import end_run, joining_marker
from asyncddp.environments.launchers import (
    LauncherEnvironment,
    SlurmEnvironment,
    TorchEnvironment,
    launcher_rank_and_size,
    mpi_launcher,
    torch_world,
)
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.transport import C10D, DEFAULT_TRANSPORT, Transport
from asyncddp.transport.base import Scope
from asyncddp.transport.selection import can_load, open_transport
from asyncddp.transport.sockets.store_access import default_group_store
from asyncddp.transport.startup_deadline import StartupDeadline

logger = logging.getLogger("asyncddp")

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
_ENDS_ALL = (
    "and launchers of MPI end all ranks where one dies. Start the script by 'asyncddp run "
    "--elastic -np N SCRIPT', or leave elastic and ASYNCDDP_ELASTIC out"
)


def open_world(config: Config) -> Transport:
    """Open the transport between all ranks of this process's world; collective.

    Raises:
        UnknownNameError: No transport has the name that the user has given.
        ArgumentError: The run is elastic, and the transport is none that goes on without a rank.
        EnvironmentProblem: Launchers contradict each other, the transport cannot be used here, or
            it knows of another number of ranks than the launcher has announced.
        WaitTimeoutError: Some ranks have not come by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    default = DEFAULT_TRANSPORT if config.transport is not None else select_default_transport()
    if config.elastic:
        check_elastic(config.transport)
    deadline = StartupDeadline(*launcher_rank_and_size(), config, end_run)
    with joining_marker(config):
        opened = open_transport(config.transport, deadline, default=default)
    if opened.started_by_mpi:
        check_size(opened.size)
    elif opened.scope is not Scope.PROCESS:
        check_joined(opened.size)
    if config.elastic and opened.size > 1:
        check_elastic_world(opened, config)
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
    launcher, torch = _launcher_of_ranks(), TorchEnvironment()
    if launcher is not None:
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


def _launcher_of_ranks() -> LauncherEnvironment | None:
    """Return the MPI launcher that has started this rank itself, if any."""
    launcher = mpi_launcher()
    # srun may have started a shell, or a torchrun on each node
    single = launcher is not None and launcher.size == 1
    inner = isinstance(launcher, SlurmEnvironment) and (single or TorchEnvironment().is_elastic)
    return None if inner else launcher


def check_elastic(transport: str | None) -> None:
    """Raise if an elastic run cannot go on after a death: by its launcher, or the given transport.

    Nothing has been exchanged yet, and all ranks raise alike.
    """
    launcher = _launcher_of_ranks()
    if launcher is not None:
        raise EnvironmentProblem(f"init(): elastic: {launcher}, {_ENDS_ALL}")
    if transport not in (None, C10D) and launcher_rank_and_size()[1] > 1:
        raise ArgumentError(
            f"init(): transport: expected {C10D!r} in an elastic run, got {transport!r}, over "
            "which the others cannot go on without a rank. Leave transport and "
            "ASYNCDDP_TRANSPORT out, or elastic and ASYNCDDP_ELASTIC"
        )


def check_elastic_world(opened: Transport, config: Config) -> None:
    """Raise if MPI connects the ranks; warn once per machine if their launcher ends the others."""
    if opened.started_by_mpi:
        raise EnvironmentProblem(f"init(): elastic: MPI has started this process, {_ENDS_ALL}")
    torch = TorchEnvironment()
    local = torch.number("LOCAL_RANK")
    goes_on = config.report_dir is not None and Path(config.report_dir, "elastic").exists()
    if not goes_on and (opened.rank if local is None else local) == 0:
        started = "asyncddp run without --elastic" if config.report_dir else torch.command
        logger.warning(
            "elastic: where a rank dies, %s ends the other ranks of its machine; only "
            "'asyncddp run --elastic -np N SCRIPT' lets them go on",
            started,
        )


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
