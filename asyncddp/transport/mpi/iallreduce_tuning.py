"""Choice of Open MPI's algorithm for nonblocking allreduce, through the MPI tools interface.

An environment variable would be read when MPI starts, which on some ranks may be before this
library is imported; ranks that run different algorithms in one collective hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_int, c_void_p, create_string_buffer
from typing import Any

from asyncddp.transport.mpi.runtime import MPI, mpi_functions

ALGORITHM = "coll_libnbc_iallreduce_algorithm"
"""Open MPI's control variable for the algorithm of nonblocking allreduce."""
DEFAULT = 0
"""Its value where nobody has set it."""
_WANTED = b"rabenseifner"
"""Every rank sends the data of nearly two tensors, instead of log2(n)."""


def _call(function: str, *args: Any) -> None:
    """Call a function of the MPI tools interface by its name after ``MPI_T_``."""
    code = getattr(mpi_functions(), f"MPI_T_{function}")(*args)
    if code:
        raise OSError(f"MPI_T_{function} has failed with code {code}")


@contextmanager
def _control_variable(name: str) -> Iterator[tuple[c_int, c_void_p]]:
    """Open an integer control variable (MPI_T cvar) of MPI; return index and handle."""
    index, handle = c_int(), c_void_p()
    with ExitStack() as opened:
        _call("init_thread", MPI.THREAD_MULTIPLE, byref(c_int()))
        opened.callback(_call, "finalize")
        _call("cvar_get_index", name.encode(), byref(index))
        _call("cvar_handle_alloc", index, None, byref(handle), byref(c_int()))
        opened.callback(_call, "cvar_handle_free", byref(handle))
        yield index, handle


def _enum_value(variable: c_int, wanted: bytes) -> c_int:
    """Return the integer of a named value of a control variable's enumeration."""
    kind, other = c_void_p(), [byref(c_int()) for _ in range(5)]
    facts = [None, other[0], other[1], byref(c_void_p()), byref(kind), None, other[2], *other[3:]]
    _call("cvar_get_info", variable, *facts)
    count, text, length = c_int(), create_string_buffer(128), c_int(128)
    _call("enum_get_info", kind, byref(count), text, byref(length))
    for index in range(count.value):
        value, length.value = c_int(), len(text)
        _call("enum_get_item", kind, c_int(index), byref(value), text, byref(length))
        if text.value == wanted:
            return value
    raise OSError(f"there is no value {wanted!r}")


def iallreduce_algorithm(change: bool = False) -> int | None:
    """Return the algorithm of nonblocking allreduce; None where MPI has no such setting.

    With ``change``, on all ranks or none, it selects the one whose traffic does not grow with them.
    """
    try:
        with _control_variable(ALGORITHM) as (index, handle):
            if change:
                _call("cvar_write", handle, byref(_enum_value(index, _WANTED)))
            value = c_int()
            _call("cvar_read", handle, byref(value))
            return value.value
    except (OSError, AttributeError):
        return None
