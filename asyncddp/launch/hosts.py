"""Parsing of host lists (``h1:2,h2``) and hostfiles into validated :class:`Host` records."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncddp.errors import ArgumentError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_EXPECTED = "a name, an IPv4 address or an [IPv6] address, with an optional :slots, like h1:2"


@dataclass(frozen=True)
class Host:
    """Machine that runs ranks: its name or address and, if given, its number of slots."""

    name: str
    slots: int | None = None

    @property
    def is_ipv6(self) -> bool:
        """True if the name is an IPv6 address."""
        return ":" in self.name

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.is_ipv6 else self.name
        return name if self.slots is None else f"{name}:{self.slots}"


def _is_name(text: str) -> bool:
    labels = text.removesuffix(".").split(".")
    if not (0 < len(text) <= 253 and all(_LABEL.fullmatch(label) for label in labels)):
        return False
    # only an address ends in a number, and then it must be one
    return len(labels) == 1 or not labels[-1].isdigit() or _is_address(text, version=4)


def _is_address(text: str, version: int) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text.split("%")[0]).version == version
    return False


def _parse_host(text: str, where: str) -> Host:
    """Parse one host: ``name``, ``name:2``, ``10.0.0.1:2`` or ``[fe80::1]:2``."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^][]+)\]|(?P<name>[^][:]+))(?::(?P<slots>[0-9]+))?", text)
    problem = ArgumentError(f"{where}: expected {_EXPECTED}, got {text!r}.")
    if match is None:
        raise problem
    name = match["v6"] or match["name"]
    if not (_is_address(name, version=6) if match["v6"] else _is_name(name)):
        raise problem
    if match["slots"] is not None and int(match["slots"]) < 1:
        raise ArgumentError(f"{where}: expected at least 1 slot, got {text!r}.")
    return Host(name, None if match["slots"] is None else int(match["slots"]))


def _check_unique(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for host in hosts:
        if found.setdefault(host.name, host) is not host:
            raise ArgumentError(
                f"{where}: {host.name!r} is there twice. Name each host once, with the number of "
                f"its ranks: {host.name}:2."
            )
    return tuple(found.values())


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the value of ``-H``, hosts separated by commas: ``h1:2,10.0.0.7,[fe80::1]:4``."""
    return _check_unique((_parse_host(item.strip(), "-H") for item in text.split(",")), "-H")


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """Parse a hostfile: one host per line, as ``name``, ``name:2`` or ``name slots=2``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--hostfile: cannot read {str(path)!r}: {error}.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if words:
            hosts.append(_parse_line(words, f"{path}, line {number}"))
    if not hosts:
        raise ArgumentError(
            f"--hostfile: {str(path)!r} names no host. Write one per line: h1 slots=2"
        )
    return _check_unique(hosts, str(path))


def _parse_line(words: Sequence[str], where: str) -> Host:
    host = _parse_host(words[0], where)
    for word in words[1:]:
        match = re.fullmatch(r"(slots|max_slots|max-slots)=([1-9][0-9]*)", word)
        if match is None:
            raise ArgumentError(f"{where}: expected slots=NUMBER after the host, got {word!r}.")
        if match[1] != "slots":  # Open MPI's max_slots has no effect here
            continue
        if host.slots is not None:
            raise ArgumentError(f"{where}: the number of slots is given twice.")
        host = replace(host, slots=int(match[2]))
    return host


def assign_slots(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Assign slots to hosts without a number: equal shares of the remaining ranks, or one each."""
    open_hosts = [host for host in hosts if host.slots is None]
    left = 0 if ranks is None else ranks - sum(host.slots or 0 for host in hosts)
    each = max(1, -(-left // len(open_hosts))) if open_hosts else 0
    return tuple(replace(host, slots=each) if host.slots is None else host for host in hosts)


def parse_placement(
    hosts: str | None, hostfile: Path | None, ranks: int | None
) -> tuple[Host, ...]:
    """Parse ``-H`` or ``--hostfile`` (not both), and assign slots to the hosts."""
    if hosts is not None and hostfile is not None:
        raise ArgumentError("-H and --hostfile: give one of them, not both.")
    parsed = () if hosts is None else parse_hosts(hosts)
    return assign_slots(parsed if hostfile is None else parse_hostfile(hostfile), ranks)


def is_loopback(interface: str) -> bool:
    """Return whether all interfaces of ``--network-interface`` are loopback interfaces.

    Example:
        >>> is_loopback("lo"), is_loopback("127.0.0.0/8"), is_loopback("lo,eth0")
        (True, True, False)
    """
    names = [name.strip() for name in interface.split(",")]
    return all(name in {"lo", "lo0"} or _is_loopback_network(name) for name in names)


def _is_loopback_network(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(text, strict=False).is_loopback
    return False


def is_this_machine(host: Host) -> bool:
    """Return whether a host is this machine, judged by its name without a DNS query."""
    own = socket.gethostname()
    known = {"localhost", own, own.split(".")[0]}
    return host.name in known or _is_loopback_network(host.name.split("%")[0])
