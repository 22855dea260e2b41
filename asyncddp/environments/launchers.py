"""Environment variables that launchers set to tell processes their rank and world size."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from typing import ClassVar

from asyncddp.errors import EnvironmentProblem

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Names in torch.distributed of the facts that launchers announce."""
_NEEDED = ("RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the script by torchrun --nproc-per-node N SCRIPT or asyncddp run -np N SCRIPT, which "
    "set them, or unset {given} to run it alone"
)


class LauncherEnvironment:
    """Base class of readers of the environment that one kind of launcher sets for ranks.

    Attributes:
        command: What starts its ranks, for messages.
        variables: The launcher's variable for each of :data:`TORCH_VARIABLES` that it announces.
        run_variables: Further variables, which tell its runs apart.
    """

    command: str
    variables: ClassVar[Mapping[str, str]]
    run_variables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.environ = environ

    def number(self, fact: str) -> int | None:
        """Return the number in the launcher's variable for one of torch's names, or None."""
        text = self.environ.get(self.variables.get(fact, ""), "")
        return int(text) if text.isdecimal() else None

    @property
    def detected(self) -> bool:
        """True if this launcher has set rank and size."""
        return self.number("RANK") is not None and self.number("WORLD_SIZE") is not None

    @property
    def rank(self) -> int:
        """Rank of this process; 0 if the launcher has set none."""
        return self.number("RANK") or 0

    @property
    def size(self) -> int:
        """Number of ranks; 1 if the launcher has set none."""
        size = self.number("WORLD_SIZE")
        return 1 if size is None else size

    @property
    def master(self) -> str | None:
        """Name or address of rank 0's machine, from ``MASTER_ADDR``; None if unset."""
        return self.environ.get("MASTER_ADDR")

    @property
    def address(self) -> str:
        """Name or address of the first machine, if known; else of this machine."""
        return self.master or socket.gethostname()

    @property
    def on_one_machine(self) -> bool:
        """True if all ranks are known to be on this machine."""
        return self.number("LOCAL_WORLD_SIZE") == self.size

    def __str__(self) -> str:
        """Describe the rank and size set by the launcher, for messages."""
        return f"{self.command} has started this process as rank {self.rank} of {self.size}"


class OpenMPIEnvironment(LauncherEnvironment):
    """Environment of a rank started by Open MPI's ``mpirun``."""

    command = "mpirun"
    variables: ClassVar[Mapping[str, str]] = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    run_variables = ("PMIX_NAMESPACE", "PMIX_RANK")


class HydraEnvironment(LauncherEnvironment):
    """Environment of a rank started by ``mpiexec`` of MPICH or Intel MPI, which use PMI."""

    command = "mpiexec"
    variables: ClassVar[Mapping[str, str]] = {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    }


class PMIxEnvironment(LauncherEnvironment):
    """Environment of a rank started by a PMIx launcher that does not set the number of ranks."""

    command = "a launcher of PMIx"
    variables: ClassVar[Mapping[str, str]] = {"RANK": "PMIX_RANK"}


class SlurmEnvironment(LauncherEnvironment):
    """Environment of a rank started by Slurm's ``srun``."""

    command = "srun"
    variables: ClassVar[Mapping[str, str]] = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
    }
    run_variables = ("SLURM_STEP_ID",)

    @property
    def address(self) -> str:
        """First host of the allocation: ``node07`` of ``node[07-12,15]``."""
        given = self.environ.get("SLURM_JOB_NODELIST", "")
        match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", given)
        return "".join(part or "" for part in match.groups()) if match else super().address

    @property
    def on_one_machine(self) -> bool:
        """True if all tasks of the step are on this node; ``2(x3)`` means three nodes."""
        return self.environ.get("SLURM_STEP_TASKS_PER_NODE") == str(self.size)


class TorchEnvironment(LauncherEnvironment):
    """Environment of a rank started by ``torchrun`` or a launcher with the same variables."""

    variables: ClassVar[Mapping[str, str]] = {name: name for name in TORCH_VARIABLES}
    run_variables = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(environ)
        self.command = "torchrun" if self.is_elastic else "a launcher of PyTorch"
        if any(name.startswith("ACCELERATE_") for name in environ):
            self.command = "accelerate launch"

    @property
    def is_elastic(self) -> bool:
        """True if torchrun has started this process, even under another launcher."""
        return "TORCHELASTIC_RUN_ID" in self.environ

    @property
    def port(self) -> int:
        """Port of the rendezvous store; the default is torch's."""
        return int(self.environ.get("MASTER_PORT", "29500"))

    @property
    def serves_store(self) -> bool:
        """True if the launcher serves the store; otherwise rank 0 does."""
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def attempt(self) -> str:
        """Restart count of the ranks after failures."""
        return self.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


MPI_LAUNCHERS = (OpenMPIEnvironment, HydraEnvironment, PMIxEnvironment, SlurmEnvironment)
"""In the order in which they count: an mpirun may start its daemons by srun."""
LAUNCHERS = (*MPI_LAUNCHERS, TorchEnvironment)


def mpi_launcher(environ: Mapping[str, str] = os.environ) -> LauncherEnvironment | None:
    """Return the MPI launcher that has set rank and size for this process, if any."""
    every = (kind(environ) for kind in MPI_LAUNCHERS)
    return next((launcher for launcher in every if launcher.detected), None)


def launcher_rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and size from the launcher's environment; ``(0, 1)`` without a launcher.

    Example:
        >>> launcher_rank_and_size({"PMI_RANK": "1", "PMI_SIZE": "4"})
        (1, 4)
        >>> launcher_rank_and_size({"RANK": "1", "WORLD_SIZE": "4"})
        (1, 4)
    """
    torch = TorchEnvironment(environ)
    launcher = torch if torch.is_elastic else mpi_launcher(environ) or torch
    return (launcher.rank, launcher.size) if launcher.detected else (0, 1)


def torch_world(environ: Mapping[str, str] = os.environ) -> TorchEnvironment | None:
    """Return the torch.distributed world described by the environment; None if there is none.

    Raises:
        EnvironmentProblem: It announces several ranks, but not all that is needed to join them.

    Example:
        >>> world = torch_world(
        ...     {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
        ... )
        >>> world.rank, world.size, world.address, world.port
        (1, 4, 'h', 29500)
    """
    torch = TorchEnvironment(environ)
    given = {name: environ[name] for name in (*_NEEDED, *_RENDEZVOUS) if name in environ}
    told = [name for name in _NEEDED if name in given]
    if not told:
        return None
    if given.get("WORLD_SIZE") == "1" or (told == ["RANK"] and given["RANK"] == "0"):
        return torch
    missing = [name for name in (*_NEEDED, *_RENDEZVOUS) if name not in given]
    if missing:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise EnvironmentProblem(
            f"the environment announces a world of several ranks ({shown}), but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
            + _REMEDY.format(given=" and ".join(told))
        )
    for name in (*_NEEDED, "MASTER_PORT"):
        if not given[name].isdecimal():
            raise EnvironmentProblem(
                f"{name}={given[name]!r}: expected a number; set it, or unset it"
            )
    if torch.rank >= torch.size:
        raise EnvironmentProblem(
            f"RANK={torch.rank} and WORLD_SIZE={torch.size}: expected 0 <= RANK < WORLD_SIZE; "
            + _REMEDY.format(given="RANK and WORLD_SIZE")
        )
    return torch


def announced(fact: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a launcher's value for one of torch's variable names; None if unset.

    Example:
        >>> announced("LOCAL_RANK", {"SLURM_LOCALID": "3"})
        '3'
    """
    names = [kind.variables[fact] for kind in LAUNCHERS if fact in kind.variables]
    return next((environ[name] for name in names if name in environ), None)


def run_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return a name of this run, equal on all ranks of this machine and unique among runs."""
    return environ.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"


def set_torch_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK and torch's other variables from a launcher's, unless any of them is set.

    Example:
        >>> environ = {"PMI_RANK": "1", "PMI_SIZE": "4"}
        >>> set_torch_variables(environ)
        >>> environ["RANK"], environ["WORLD_SIZE"]
        ('1', '4')
    """
    if environ.keys().isdisjoint(TORCH_VARIABLES):
        for name in TORCH_VARIABLES:
            if (value := announced(name, environ)) is not None:
                environ[name] = value


def ranks_of_one_machine(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks if all are on this machine, else None.

    It is 1 without a launcher, and None where some ranks are or may be on other machines.

    Example:
        >>> ranks_of_one_machine({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
        4
        >>> ranks_of_one_machine({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    """
    every = [kind(environ) for kind in MPI_LAUNCHERS]
    for launcher in every:
        if launcher.number("WORLD_SIZE") is not None:
            return launcher.size if launcher.on_one_machine else None
    return None if any(launcher.number("RANK") is not None for launcher in every) else 1


def without_launchers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Copy an environment without the rank variables of surrounding launchers.

    Example:
        >>> without_launchers({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "node7"})
        {'MASTER_ADDR': 'node7'}
    """
    theirs = {name for kind in MPI_LAUNCHERS for name in announcement_of(kind)}
    left_out = theirs | {*TORCH_VARIABLES, "TORCHELASTIC_RUN_ID"}
    return {name: text for name, text in environ.items() if name not in left_out}


def announcement_of(kind: type[LauncherEnvironment]) -> tuple[str, ...]:
    """Return all environment variables that a launcher sets to describe a rank and its run."""
    return (*kind.variables.values(), *kind.run_variables)
