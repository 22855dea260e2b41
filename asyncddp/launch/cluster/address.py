"""Where a controller listens for the engines."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.launch.cluster.folder import needs
from asyncddp.launch.hosts import Host, is_this_machine

__all__ = ["LOOPBACK", "listening_address"]

LOOPBACK = "127.0.0.1"


def listening_address(hosts: Sequence[Host], interface: str | None, *, remote: bool) -> str:
    """The address at which all engines reach the controller.

    Args:
        hosts: Machines of the engines.
        interface: Name of an interface, or a network, as given by ``--network-interface``.
        remote: Whether other machines take part; if not, only this one can connect.

    Returns:
        An IPv4 address of this machine: loopback's where all engines are here.

    Raises:
        ArgumentError: There is no such interface, or it has no IPv4 address.
        EnvironmentProblem: No way leads to the other machines.

    Example:
        >>> listening_address((), "eth0", remote=False)
        '127.0.0.1'
    """
    if not remote:
        return LOOPBACK
    if interface is not None:
        return _address_of(interface.split(",")[0])
    other = next((host.name for host in hosts if not is_this_machine(host)), None)
    return _by_own_name() if other is None else _towards(other)


def _addresses() -> dict[str, list[str]]:
    try:
        import psutil
    except ImportError as problem:
        raise needs("psutil") from problem
    found = psutil.net_if_addrs().items()
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in found
    }


def _address_of(interface: str) -> str:
    """The address that this machine has at an interface or in a network."""
    every = _addresses()
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


def _by_own_name() -> str:
    """The address that this machine's name has, where a batch system chooses the others."""
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


def _towards(host: str) -> str:
    """The address that this machine shows to another one; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise EnvironmentProblem(
            f"no way leads from here to {host!r} ({problem}); say by --network-interface through "
            "which interface the engines reach this machine"
        ) from problem
