"""Settings of Open MPI that all ranks must share: changed in ``init()``, once all have come.

An environment variable would be read when MPI starts, which on some ranks may be before this
library is imported; ranks that run different algorithms in one collective wait for ever.
"""

from __future__ import annotations

import ctypes

from asyncddp.transport.mpi_library import MPI, library

__all__ = ["ALGORITHM", "algorithm_of_sums", "choose_algorithm_of_sums"]

ALGORITHM = "coll_libnbc_iallreduce_algorithm"
"""Open MPI's name of the algorithm of sums that do not block."""
_DEFAULT = 0
_WANTED = b"rabenseifner"
"""Every rank sends nearly two tensors, instead of log2(n)."""


class _Variable:
    """An integer control variable of the MPI library (MPI_T)."""

    def __init__(self, name: str) -> None:
        self._lib, self._index = library(), ctypes.c_int()
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
        """The value."""
        value = ctypes.c_int()
        self._check(self._lib.MPI_T_cvar_read(self._handle, ctypes.byref(value)))
        return value.value

    def write(self, value: int) -> None:
        """Change the value."""
        self._check(self._lib.MPI_T_cvar_write(self._handle, ctypes.byref(ctypes.c_int(value))))

    def number_of(self, wanted: bytes) -> int:
        """The value that is called so."""
        kind, other = ctypes.c_void_p(), [ctypes.byref(ctypes.c_int()) for _ in range(5)]
        void = ctypes.byref(ctypes.c_void_p())
        facts = [None, other[0], other[1], void, ctypes.byref(kind), None, other[2], *other[3:]]
        self._check(self._lib.MPI_T_cvar_get_info(self._index, *facts))
        count, text, length = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int(128)
        size = ctypes.byref(length)
        self._check(self._lib.MPI_T_enum_get_info(kind, ctypes.byref(count), text, size))
        for place in range(count.value):
            value, length.value = ctypes.c_int(), len(text)
            item = ctypes.byref(value), text, size
            self._check(self._lib.MPI_T_enum_get_item(kind, ctypes.c_int(place), *item))
            if text.value == wanted:
                return value.value
        raise OSError(f"there is no value {wanted!r}")

    def close(self) -> None:
        """Let go of it."""
        self._lib.MPI_T_cvar_handle_free(ctypes.byref(self._handle))
        self._lib.MPI_T_finalize()


def algorithm_of_sums(change: bool = False) -> int | None:
    """The algorithm of sums that do not block; None where the MPI library has no such setting.

    Args:
        change: Choose the one whose traffic does not grow with the ranks; on all ranks or none.
    """
    try:
        variable = _Variable(ALGORITHM)
    except (OSError, AttributeError):
        return None
    try:
        if change:
            variable.write(variable.number_of(_WANTED))
        return variable.read()
    except (OSError, AttributeError):
        return None
    finally:
        variable.close()


def choose_algorithm_of_sums(all_ranks: set[int | None]) -> None:
    """Choose where nobody has: every rank has the setting, at its default."""
    if all_ranks == {_DEFAULT}:
        algorithm_of_sums(change=True)
