"""What a cluster shall be: checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncddp.errors import ArgumentError
from asyncddp.launch.cluster.address import LOOPBACK, listening_address
from asyncddp.launch.locate import locate
from asyncddp.launch.options import RunOptions
from asyncddp.launch.run_command import job_for

__all__ = ["ENGINE", "MISSES", "Plan", "plan_for"]

ENGINE = "asyncddp.launch.cluster.engine"
MISSES = 240
"""Heartbeats without an answer after which controller and engines think each other dead."""


@dataclass(frozen=True)
class Plan:
    """A cluster to be started.

    Attributes:
        ranks: How many engines.
        options: Of ``asyncddp run``, which starts them.
        address: Where the controller listens for them.
    """

    ranks: int
    options: tuple[str, ...]
    address: str = LOOPBACK

    @property
    def encrypted(self) -> bool:
        """Whether what travels between engines and controller is encrypted, and not only signed."""
        return self.address != LOOPBACK


def plan_for(given: RunOptions, environment: Mapping[str, str] | None = None) -> Plan:
    """Check what the user gave.

    Raises:
        ArgumentError: An option has a value that cannot be served.
        EnvironmentProblem: There is no MPI launcher, or none that is known.
    """
    environment = os.environ if environment is None else environment
    locate(given.launcher, environment)
    job = job_for(given, [ENGINE], environment, module=True)
    if given.num_proc is None and not job.hosts:
        raise ArgumentError("-np: say how many engines to start, or on which hosts (-H).")
    remote = job.remote and environment.get("SLURM_JOB_NUM_NODES") != "1"
    address = listening_address(job.hosts, given.network_interface, remote=remote)
    return Plan(job.ranks, _words(given), address)


def _words(given: RunOptions) -> tuple[str, ...]:
    """The same options, as words."""
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
