"""Specification of a notebook cluster, validated before any process is started."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from asyncddp.environments.rank_process_marker import environment_of_children
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.install_commands import needed_package
from asyncddp.launch.hosts import Host, is_this_machine
from asyncddp.launch.job_builder import build_job
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launcher_discovery import find_launcher

ENGINE_MODULE = "asyncddp.launch.notebook_cluster.rank_engine"
MAX_MISSED_HEARTBEATS = 240
"""Missed heartbeats after which controller and engines regard each other as dead."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ClusterSpec:
    """Specification of a notebook cluster: ranks, ``asyncddp run`` options, controller address."""

    ranks: int
    options: tuple[str, ...]
    address: str = _LOOPBACK

    @property
    def encrypted(self) -> bool:
        """True if messages between engines and controller are encrypted, beyond being signed."""
        return self.address != _LOOPBACK


def build_cluster_spec(given: RunOptions) -> ClusterSpec:
    """Validate the user's options and build the specification."""
    environment = environment_of_children()
    find_launcher(given.launcher, environment)
    job = build_job(given, [ENGINE_MODULE], environment, module=True)
    if given.num_proc is None and not job.hosts:
        raise ArgumentError("-np: say how many engines to start, or on which hosts (-H).")
    remote = job.remote and environment.get("SLURM_JOB_NUM_NODES") != "1"
    address = controller_address(job.hosts, given.network_interface, remote=remote)
    return ClusterSpec(job.ranks, given.to_arguments(), address)


def controller_address(hosts: Sequence[Host], interface: str | None, *, remote: bool) -> str:
    """Return an IPv4 address of the controller that all engines can reach, ``remote`` ones too."""
    if not remote:
        return _LOOPBACK
    if interface is not None:
        return _interface_address(interface.split(",")[0])
    other = next((host.name for host in hosts if not is_this_machine(host)), None)
    return _host_name_address() if other is None else _route_address(other)


def _interface_address(interface: str) -> str:
    with needed_package("notebooks need psutil", "notebook"):
        import psutil
    every = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if "/" not in interface:
        own = every.get(interface, [])
    else:
        try:
            network = ipaddress.ip_network(interface, strict=False)
        except ValueError as problem:
            raise ArgumentError(f"--network-interface: {problem}") from problem
        flat = [address for addresses in every.values() for address in addresses]
        own = [address for address in flat if ipaddress.ip_address(address) in network]
    if not own:
        names = ", ".join(f"{name} ({', '.join(has)})" for name, has in every.items() if has)
        raise ArgumentError(
            f"--network-interface: this machine has no IPv4 address at {interface!r}; it has "
            f"{names}"
        )
    return own[0]


def _host_name_address() -> str:
    """Return the address of this machine's host name, for hosts of a batch system."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = _LOOPBACK
    if ipaddress.ip_address(found).is_loopback:
        raise ArgumentError(
            "the engines may run on other machines: say by --network-interface through which "
            "interface they reach this one"
        )
    return found


def _route_address(host: str) -> str:
    """Return the local address of the route to another host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise EnvironmentProblem(
            f"no way leads from here to {host!r} ({problem}); say by --network-interface through "
            "which interface the engines reach this machine"
        ) from problem
