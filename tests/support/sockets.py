"""Which sockets of a run other machines could reach."""

import contextlib
import ctypes
import os
import socket

import psutil

from asyncddp.restrict_listening_sockets import listeners

_PIDFD_GETFD = 438
_NAME = 16  # bytes of an interface's name


def device_of(process, descriptor):
    """The interface to which a socket of another process is bound; empty for all of them."""
    pidfd = os.pidfd_open(process)
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    os.close(pidfd)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=copy) as taken:
        return taken.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _NAME).rstrip(b"\0")


def free_ports(count):
    """Ports of loopback that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def open_to_others(processes):
    """The sockets that listen beyond this machine, each with its process and address."""
    found = []
    for process in processes:
        for listener in listeners(process.pid):
            bound = device_of(process.pid, listener.descriptor)
            if not listener.is_loopback and bound != b"lo":
                found.append(f"{process.name()}: {listener.address}:{listener.port}")
    return found


def answers_at_other_addresses(processes):
    """Where something answers that is asked at another address of this machine than loopback's."""
    ports = {listener.port for process in processes for listener in listeners(process.pid)}
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    own = [entry.address for entry in entries if entry.family == socket.AF_INET]
    found = []
    for address in own:
        for port in ports if not address.startswith("127.") else ():
            try:
                socket.create_connection((address, port), timeout=5).close()
            except OSError:
                continue
            found.append((address, port))
    return found
