"""Which sockets of a process listen, and closing them to other machines. Linux; nothing elsewhere.

Open MPI's launcher and its TCP module listen on all interfaces, whichever one names. Where all
ranks are on one machine nobody else has to reach them: a socket that is bound to the loopback
device takes connections of this machine alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Listener",
    "confine",
    "confine_while_it_runs",
    "inodes",
    "listeners",
    "local_open_mpi",
    "ranks_of_one_machine",
]

_LISTENS = "0A"  # the state in /proc/net/tcp
_PIDFD_GETFD = 438  # number of the system call, which Python does not offer
_LOOPBACK_DEVICE = b"lo\0"
_FIRST_LOOK, _LAST_LOOK = 0.001, 1.0  # seconds between two looks, ever longer
_SEGMENT = 18 << 20  # bytes of /dev/shm that Open MPI's shared memory wants for each rank
_LAUNCHED = (  # each with the number of ranks, and the same number where all are on one machine
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens.

    Attributes:
        descriptor: Its number in its process.
        inode: What tells it from all others of the machine.
        address: Where it listens.
        port: On which port.
    """

    descriptor: int
    inode: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether its address is one that other machines cannot reach."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return bool((mapped or self.address).is_loopback)


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Read ``0100007F:1F90``, whose words of 32 bits are in the byte order of the processor."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(packed), int(port, 16)


def listeners(process: int | None = None) -> list[Listener]:
    """The TCP sockets on which a process listens.

    Args:
        process: Its number; this one's own if None.

    Raises:
        OSError: It has ended, or is another user's.
    """
    folder = Path("/proc") / ("self" if process is None else str(process))
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (folder / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    found[f"socket:[{words[9]}]"] = int(words[9]), *_address(words[1])
    return [
        Listener(descriptor, *found[link])
        for descriptor, link in _links(folder / "fd")
        if link in found
    ]


def inodes() -> frozenset[int]:
    """The sockets on which this process listens; none where that cannot be known."""
    with contextlib.suppress(OSError):
        return frozenset(listener.inode for listener in listeners())
    return frozenset()


def _links(folder: Path) -> Iterator[tuple[int, str]]:
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            yield int(entry.name), str(entry.readlink())


def confine(process: int | None = None, known: frozenset[int] = frozenset()) -> set[int]:
    """Close the sockets on which a process listens to other machines.

    Args:
        process: Its number; this one's own if None.
        known: Inodes of sockets that are left alone.

    Returns:
        Inodes of those that were closed to other machines.

    Raises:
        OSError: The process has ended, is another user's, or the kernel is older than Linux 5.7.
    """
    found = set()
    for listener in listeners(process):
        if listener.inode in known or listener.is_loopback:
            continue
        with socket.socket(fileno=_duplicate(process, listener.descriptor)) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
        found.add(listener.inode)
    return found


def _duplicate(process: int | None, descriptor: int) -> int:
    """A descriptor of one's own for a socket of a process."""
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


def confine_while_it_runs(process: int) -> None:
    """Have a thread close what a child listens on to other machines, until the child ends."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or an old one
        pidfd = os.pidfd_open(process)
        arguments = (process, pidfd)
        threading.Thread(target=_look_on, args=arguments, name="confine", daemon=True).start()


def _look_on(process: int, pidfd: int) -> None:
    known: frozenset[int] = frozenset()
    pause = _FIRST_LOOK
    try:
        while not select.select([pidfd], [], [], pause)[0]:
            known |= confine(process, known)
            pause = min(_LAST_LOOK, pause * 1.1)
    except OSError:
        return  # it has ended, or the system does not allow it
    finally:
        os.close(pidfd)


def ranks_of_one_machine(environment: Mapping[str, str]) -> int | None:
    """How many ranks there are if this machine has all of them, by the launcher's variables.

    Returns:
        Their number, 1 without a launcher; None where others are elsewhere, or may be.

    Example:
        >>> ranks_of_one_machine({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
        4
        >>> ranks_of_one_machine({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    """
    for name, here in _LAUNCHED:
        if name in environment:
            size = environment[name]
            return int(size) if environment.get(here) == size else None
    return None if {"PMI_RANK", "PMIX_RANK", "SLURM_PROCID"} & environment.keys() else 1


def local_open_mpi(environment: Mapping[str, str], ranks: int, *, all_told: bool) -> dict[str, str]:
    """Variables that tell Open MPI that no other machine takes part.

    Args:
        environment: Its variables so far; where they choose networks, nothing is added.
        ranks: How many there are, all on this machine.
        all_told: Whether each of them is told before it starts MPI. Else Open MPI complains where
            some have TCP and others have not, though shared memory serves.
    """
    names = ("btl", "btl_tcp_if_include", "btl_tcp_if_exclude")
    if any(f"OMPI_MCA_{name}" in environment for name in names):
        return {}
    if _room(environment) >= ranks * _SEGMENT:
        return {"OMPI_MCA_btl": "^tcp"} if all_told else {}
    return {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}


def _room(environment: Mapping[str, str]) -> int:
    """Bytes that are free where Open MPI keeps shared memory."""
    try:
        found = os.statvfs(environment.get("OMPI_MCA_btl_sm_backing_directory", "/dev/shm"))
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
