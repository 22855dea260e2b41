"""Families of MPI launchers: one file each, behind :mod:`asyncddp.launch.vendors.contract`."""

from __future__ import annotations

from asyncddp.launch.vendors.contract import Death, Launcher, Noise
from asyncddp.registry import Registry

__all__ = ["VENDORS", "Death", "Launcher", "Noise"]

VENDORS: Registry[Launcher] = Registry(
    "launcher",
    {
        "intel_mpi": "asyncddp.launch.vendors.hydra:INTEL_MPI",
        "mpich": "asyncddp.launch.vendors.hydra:MPICH",
        "open_mpi_4": "asyncddp.launch.vendors.open_mpi:OPEN_MPI_4",
        "open_mpi_5": "asyncddp.launch.vendors.open_mpi:OPEN_MPI_5",
        "slurm": "asyncddp.launch.vendors.slurm:SLURM",
    },
    group="asyncddp.launchers",
)
