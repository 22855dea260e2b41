"""Reading of another process's private memory with a single copy (Linux cross memory attach)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable


class _IOVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find_system_call() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):  # no Linux
        return None
    call.restype = ctypes.c_ssize_t
    return call


_read = _find_system_call()


def read_peer_memory(process: int, address: int, into: int, nbytes: int) -> None:
    """Copy ``nbytes`` from an address of another process to an address of this process.

    Raises an OSError if the system forbids it, or if the process or its memory is gone.

    Example:
        >>> import torch
        >>> given, taken = torch.arange(3), torch.zeros(3, dtype=torch.int64)
        >>> read_peer_memory(os.getpid(), given.data_ptr(), taken.data_ptr(), given.nbytes)
        >>> taken
        tensor([0, 1, 2])

    References:
        Linux manual page ``process_vm_readv(2)``.
    """
    if _read is None:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv")
    done = 0
    while done < nbytes:
        here = _IOVector(into + done, nbytes - done)
        there = _IOVector(address + done, nbytes - done)
        got = _read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
        done += got
