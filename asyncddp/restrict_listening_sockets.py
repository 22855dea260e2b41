"""Restriction of a process's listening TCP sockets to the loopback device (Linux).

Open MPI's launcher and its TCP module listen on all interfaces, whichever one names. Where all
ranks are on one machine no other machine has to reach them: a socket that is bound to the loopback
device accepts connections from this machine alone. On other systems nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import threading
from collections.abc import Mapping

from asyncddp.config import read_variable
from asyncddp.tcp_sockets import TCPSocket, copy_of, tcp_sockets

_LOOPBACK_DEVICE = b"lo\0"
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 1.0  # seconds between two scans, growing
_SEGMENT_BYTES = 18 << 20  # bytes of /dev/shm that Open MPI's shared memory wants for each rank


def listeners(process: int | None = None) -> list[TCPSocket]:
    """List the listening TCP sockets of a process of this user, by default of this process."""
    return [found for found in tcp_sockets(process) if found.peer_port is None]


def inodes() -> frozenset[int]:
    """Return the inodes of this process's listening sockets; empty if unknown."""
    with contextlib.suppress(OSError):
        return frozenset(listener.inode for listener in listeners())
    return frozenset()


def confine(process: int | None = None, known: frozenset[int] = frozenset()) -> set[int]:
    """Bind a process's listening sockets to the loopback device, unreachable from other machines.

    Sockets of known inodes are left alone; the inodes of those that were bound are returned. It
    raises an OSError for another user's process, and on kernels older than Linux 5.7.
    """
    found = set()
    for listener in listeners(process):
        if listener.inode in known or listener.is_loopback:
            continue
        with copy_of(listener, process) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
        found.add(listener.inode)
    return found


def confine_while_it_runs(process: int) -> None:
    """Start a thread that confines a child's listening sockets until the child exits."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or an old one
        arguments = process, os.pidfd_open(process)
        threading.Thread(
            target=_confine_until_exit, args=arguments, name="confine", daemon=True
        ).start()


def _confine_until_exit(process: int, pidfd: int) -> None:
    known: frozenset[int] = frozenset()
    pause = _FIRST_PAUSE
    try:
        while not select.select([pidfd], [], [], pause)[0]:
            known |= confine(process, known)
            pause = min(_LAST_PAUSE, pause * 1.1)
    except OSError:
        return  # the process has ended, or the system does not allow it
    finally:
        os.close(pidfd)


def local_open_mpi(
    ranks: int, environment: Mapping[str, str] | None = None, *, all_told: bool
) -> dict[str, str]:
    """Return environment variables that tell Open MPI that no other machine takes part.

    Where the environment chooses networks, nothing is added. Where not all ranks are told before
    they start MPI, TCP stays: else Open MPI warns, though all ranks use shared memory. Libfabric
    (``ofi``) is left out, as its search for hardware takes a second.
    """
    names = ("btl", "btl_tcp_if_include", "btl_tcp_if_exclude")
    chosen = {read_variable(f"OMPI_MCA_{name}", str, environment) for name in names}
    if chosen - {None, "^ofi"}:  # which asyncddp run sets where other machines may take part
        return {}
    folder = read_variable("OMPI_MCA_btl_sm_backing_directory", str, environment) or "/dev/shm"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free >= ranks * _SEGMENT_BYTES:
            return {"OMPI_MCA_btl": "^ofi,tcp" if all_told else "^ofi"}
    return {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}
