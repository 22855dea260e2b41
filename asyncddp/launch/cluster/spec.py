"""Specification of a notebook cluster, validated before any process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncddp.errors import ArgumentError
from asyncddp.launch.cluster.controller_address import LOOPBACK, controller_address
from asyncddp.launch.job_builder import build_job
from asyncddp.launch.launcher_discovery import find_launcher
from asyncddp.launch.run_options import RunOptions

ENGINE_MODULE = "asyncddp.launch.cluster.rank_engine"
MAX_MISSED_HEARTBEATS = 240
"""Missed heartbeats after which controller and engines regard each other as dead."""


@dataclass(frozen=True)
class ClusterSpec:
    """Specification of a notebook cluster: ranks, ``asyncddp run`` options, controller address.

    Attributes:
        ranks: Number of engines.
        options: Options of ``asyncddp run``, which starts them.
        address: Address at which the controller listens for them.
    """

    ranks: int
    options: tuple[str, ...]
    address: str = LOOPBACK

    @property
    def encrypted(self) -> bool:
        """True if messages between engines and controller are encrypted, not only signed."""
        return self.address != LOOPBACK


def build_cluster_spec(
    given: RunOptions, environment: Mapping[str, str] | None = None
) -> ClusterSpec:
    """Validate the user's options and build the specification.

    Raises:
        ArgumentError: An option has a value that cannot be served.
        EnvironmentProblem: There is no MPI launcher, or none that is known.
    """
    environment = os.environ if environment is None else environment
    find_launcher(given.launcher, environment)
    job = build_job(given, [ENGINE_MODULE], environment, module=True)
    if given.num_proc is None and not job.hosts:
        raise ArgumentError("-np: say how many engines to start, or on which hosts (-H).")
    remote = job.remote and environment.get("SLURM_JOB_NUM_NODES") != "1"
    address = controller_address(job.hosts, given.network_interface, remote=remote)
    return ClusterSpec(job.ranks, _to_arguments(given), address)


def _to_arguments(given: RunOptions) -> tuple[str, ...]:
    """Convert the options back to command-line arguments of ``asyncddp run``."""
    named = {
        "-np": given.num_proc,
        "-H": given.hosts,
        "--hostfile": given.hostfile,
        "--network-interface": given.network_interface,
        "--ssh-port": given.ssh_port,
        "--remote-shell": given.remote_shell,
        "--launcher": given.launcher,
    }
    words = [
        word for name, value in named.items() if value is not None for word in (name, str(value))
    ]
    words += [word for item in given.exports for word in ("-x", item)]
    words += [f"--mpi-args={text}" for text in given.mpi_args]
    return (*words, *(["--verbose"] if given.verbose else []))
