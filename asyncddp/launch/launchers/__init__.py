"""MPI launchers (Open MPI, MPICH, Intel MPI, Slurm), one file each, and their registry."""

from __future__ import annotations

from asyncddp.launch.launchers.launcher import FailedRank, Launcher, LauncherOutputPatterns
from asyncddp.registry import PluginRegistry

__all__ = ["LAUNCHERS", "FailedRank", "Launcher", "LauncherOutputPatterns"]

LAUNCHERS: PluginRegistry[Launcher] = PluginRegistry(
    "launcher",
    {
        "intel_mpi": "asyncddp.launch.launchers.hydra:INTEL_MPI",
        "mpich": "asyncddp.launch.launchers.hydra:MPICH",
        "open_mpi_4": "asyncddp.launch.launchers.open_mpi:OPEN_MPI_4",
        "open_mpi_5": "asyncddp.launch.launchers.open_mpi:OPEN_MPI_5",
        "slurm": "asyncddp.launch.launchers.slurm:SLURM",
    },
    group="asyncddp.launchers",
)
