"""Addresses of a rank: its listening sockets, and connections to those of other ranks."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import secrets
import socket
import struct
from typing import NamedTuple

from asyncddp.config import read_variable
from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.sockets.authentication import is_same_user
from asyncddp.transport.sockets.world_records import RankRecord

_CONNECT_TIMEOUT = 10.0  # seconds
_SIOCGIFADDR = 0x8915
_INTERFACE = "GLOO_SOCKET_IFNAME"  # as for gloo: the network interface between machines
_BACKLOG = 4096
THIS_MACHINE_ALONE = ("localhost", "127.0.0.1", "::1")
"""Names and addresses that mean the machine itself on every machine."""


class ListeningSockets(NamedTuple):
    """Listening sockets of a rank, and the addresses that other ranks use."""

    unix: socket.socket
    tcp: socket.socket
    unix_name: str
    host: str
    port: int

    def close(self) -> None:
        """Close both sockets."""
        self.unix.close()
        self.tcp.close()


def open_listeners(master: str, port: int) -> ListeningSockets:
    """Listen for other ranks, on the network interface that leads to the master's address.

    Raises:
        EnvironmentProblem: The master has no address, or there is no such interface.
    """
    unix_name = f"asyncddp-c10d-{secrets.token_hex(8)}"
    host = _own_address(master, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # a master that knows its own name by a loopback address has others as well
    everywhere = is_loopback(host) and master not in THIS_MACHINE_ALONE
    with contextlib.ExitStack() as opened:
        unix = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        tcp = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        unix.bind(f"\0{unix_name}")
        tcp.bind(("" if everywhere else host, 0))
        for listener in (unix, tcp):
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        opened.pop_all()
    return ListeningSockets(unix, tcp, unix_name, host, tcp.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Resolve a host name; EnvironmentProblem if it has no address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise EnvironmentProblem(
            f"MASTER_ADDR={host}: this name has no address here ({error}); set it to the name or "
            "address of rank 0's machine, as the other machines see it"
        ) from error
    return family, (str(address[0]), int(address[1]))


def _own_address(master: str, port: int) -> str:
    """Return the address of the interface that reaches the master, or of the one the user names."""
    interface = (read_variable(_INTERFACE, str) or "").partition(",")[0]
    if interface:
        return _address_of_interface(interface)
    family, address = resolve(master, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError as error:
            raise EnvironmentProblem(
                f"MASTER_ADDR={master}: no network leads there ({error})"
            ) from error
        return str(probe.getsockname()[0])


def _address_of_interface(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise EnvironmentProblem(
                f"{_INTERFACE}={interface}: this machine has no interface of that name with an "
                f"IPv4 address; it has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def connect_to(mine: RankRecord, theirs: RankRecord, network_timeout: float) -> socket.socket:
    """Open a connection to a rank; over TCP it may still be in progress, until a timeout."""
    if mine.machine == theirs.machine:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = theirs.unix_address()
    else:
        family = socket.AF_INET6 if ":" in theirs.host else socket.AF_INET
        sock, address = socket.socket(family, socket.SOCK_STREAM), (theirs.host, theirs.port)
    try:
        if sock.family != socket.AF_UNIX:  # tried again after 1, 3, 7 … seconds
            tries = max(1, int(math.log2(network_timeout + 1)) - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, tries)
        sock.settimeout(_CONNECT_TIMEOUT if sock.family == socket.AF_UNIX else 0.0)
        with contextlib.suppress(BlockingIOError):  # what comes of it is found by writing
            sock.connect(address)
        if sock.family == socket.AF_UNIX and not is_same_user(sock):
            raise PermissionError("another user listens at its address")
    except OSError:
        sock.close()
        raise
    return sock
