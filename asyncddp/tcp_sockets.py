"""Listing of a process's TCP sockets, and duplicates of them for setting options (Linux).

Open MPI offers no access to its sockets. On other systems there are none to be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _LISTEN = "01", "0A"  # states in /proc/net/tcp
_PIDFD_GETFD = 438  # number of the system call, which Python does not offer


@dataclass(frozen=True)
class TCPSocket:
    """TCP socket of a process, identified on its machine by its inode number.

    Attributes:
        descriptor: The process's.
        inode: Inode number of the socket.
        address, port: Address of this end.
        peer_port: Port of the other end; None for a listening socket.
    """

    descriptor: int
    inode: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    peer_port: int | None

    @property
    def is_loopback(self) -> bool:
        """True if the socket is bound to a loopback address, unreachable from other machines."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return bool((mapped or self.address).is_loopback)


def tcp_sockets(process: int | None = None) -> list[TCPSocket]:
    """List the listening and connected TCP sockets of a process of this user.

    Args:
        process: By default this process.

    Raises:
        OSError: It has ended, is another user's, or the system has no ``/proc``.
    """
    folder = Path("/proc") / ("self" if process is None else str(process))
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (folder / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] in (_ESTABLISHED, _LISTEN):
                    peer = _address(words[2])[1] if words[3] == _ESTABLISHED else None
                    found[f"socket:[{words[9]}]"] = int(words[9]), *_address(words[1]), peer
    sockets = []
    for entry in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            link = str(entry.readlink())
            if link in found:
                sockets.append(TCPSocket(int(entry.name), *found[link]))
    return sockets


def copy_of(found: TCPSocket, process: int | None = None) -> socket.socket:
    """Duplicate a socket of a process; the caller must close the duplicate."""
    return socket.socket(fileno=_duplicate(process, found.descriptor))


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Parse ``0100007F:1F90``; its 32-bit words are in the processor's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(packed), int(port, 16)


def _duplicate(process: int | None, descriptor: int) -> int:
    if process is None:
        return os.dup(descriptor)
    pidfd = os.pidfd_open(process)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = int(libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
    finally:
        os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copy
