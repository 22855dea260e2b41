"""Finds the address at which an ipyparallel controller listens for engines, the ranks."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.launch.cluster.profile_directory import missing_package
from asyncddp.launch.hosts import Host, is_this_machine

LOOPBACK = "127.0.0.1"


def controller_address(hosts: Sequence[Host], interface: str | None, *, remote: bool) -> str:
    """Return the address at which all engines can reach the controller.

    Args:
        hosts: Hosts of the engines.
        interface: Interface name or network, as given by ``--network-interface``.
        remote: Whether other machines take part.

    Returns:
        An IPv4 address of this machine: loopback's where all engines are here.

    Raises:
        ArgumentError: There is no such interface, or it has no IPv4 address.
        EnvironmentProblem: There is no route to the other machines.

    Example:
        >>> controller_address((), "eth0", remote=False)
        '127.0.0.1'
    """
    if not remote:
        return LOOPBACK
    if interface is not None:
        return _interface_address(interface.split(",")[0])
    other = next((host.name for host in hosts if not is_this_machine(host)), None)
    return _host_name_address() if other is None else _route_address(other)


def _interface_addresses() -> dict[str, list[str]]:
    try:
        import psutil
    except ImportError as problem:
        raise missing_package("psutil") from problem
    found = psutil.net_if_addrs().items()
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in found
    }


def _interface_address(interface: str) -> str:
    """Return this machine's address on an interface or in a network."""
    every = _interface_addresses()
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
        found = LOOPBACK
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
