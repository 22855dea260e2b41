"""Choice of Open MPI's algorithm for nonblocking allreduce, through the MPI tools interface.

An environment variable would be read when MPI starts, which on some ranks may be before this
library is imported; ranks that run different algorithms in one collective hang.
"""

from __future__ import annotations

import ctypes

from asyncddp.transport.mpi.runtime import MPI, mpi_functions

ALGORITHM = "coll_libnbc_iallreduce_algorithm"
"""Open MPI's control variable for the algorithm of nonblocking allreduce."""
_DEFAULT = 0
_WANTED = b"rabenseifner"
"""Every rank sends the data of nearly two tensors, instead of log2(n)."""


class _ControlVariable:
    """Integer control variable (MPI_T cvar) of the MPI library."""

    def __init__(self, name: str) -> None:
        self._lib, self._index = mpi_functions(), ctypes.c_int()
        self._check(self._lib.MPI_T_init_thread(MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())))
        try:
            index = ctypes.byref(self._index)
            self._check(self._lib.MPI_T_cvar_get_index(name.encode(), index))
            self._handle, count = ctypes.c_void_p(), ctypes.c_int()
            handle = ctypes.byref(self._handle)
            code = self._lib.MPI_T_cvar_handle_alloc(self._index, None, handle, ctypes.byref(count))
            self._check(code)
        except OSError:
            self._lib.MPI_T_finalize()
            raise

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"an MPI_T function has failed with code {code}")

    def read(self) -> int:
        value = ctypes.c_int()
        self._check(self._lib.MPI_T_cvar_read(self._handle, ctypes.byref(value)))
        return value.value

    def write(self, value: int) -> None:
        self._check(self._lib.MPI_T_cvar_write(self._handle, ctypes.byref(ctypes.c_int(value))))

    def enum_value(self, wanted: bytes) -> int:
        """Return the integer of a named value of the variable's enumeration."""
        kind, other = ctypes.c_void_p(), [ctypes.byref(ctypes.c_int()) for _ in range(5)]
        void = ctypes.byref(ctypes.c_void_p())
        facts = [None, other[0], other[1], void, ctypes.byref(kind), None, other[2], *other[3:]]
        self._check(self._lib.MPI_T_cvar_get_info(self._index, *facts))
        count, text, length = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int(128)
        size = ctypes.byref(length)
        self._check(self._lib.MPI_T_enum_get_info(kind, ctypes.byref(count), text, size))
        for index in range(count.value):
            value, length.value = ctypes.c_int(), len(text)
            item = ctypes.byref(value), text, size
            self._check(self._lib.MPI_T_enum_get_item(kind, ctypes.c_int(index), *item))
            if text.value == wanted:
                return value.value
        raise OSError(f"there is no value {wanted!r}")

    def close(self) -> None:
        self._lib.MPI_T_cvar_handle_free(ctypes.byref(self._handle))
        self._lib.MPI_T_finalize()


def iallreduce_algorithm(change: bool = False) -> int | None:
    """Return the algorithm of nonblocking allreduce; None where MPI has no such setting.

    With ``change``, on all ranks or none, it selects the one whose traffic does not grow with them.
    """
    try:
        variable = _ControlVariable(ALGORITHM)
    except (OSError, AttributeError):
        return None
    try:
        if change:
            variable.write(variable.enum_value(_WANTED))
        return variable.read()
    except (OSError, AttributeError):
        return None
    finally:
        variable.close()


def select_iallreduce_algorithm(all_ranks: set[int | None]) -> None:
    """Select the algorithm if every rank has the setting, at its default."""
    if all_ranks == {_DEFAULT}:
        iallreduce_algorithm(change=True)
