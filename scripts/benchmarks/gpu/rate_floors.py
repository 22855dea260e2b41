"""Lowest rates of transports, far below what any working one has, to notice a broken one."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.gpu.verb_tables import COPY, SLOWER
from benchmarks.tables import MB, TimingRow, size_text, time_text

_LARGE = 64 * MB  # from here on the rate counts, and no longer what a call costs

FLOORS = {
    "cuda_staged": (SLOWER, 30),
    "cuda_ipc": (COPY, 200),
    "nccl": (COPY, 200),
    "mpi_cuda": (COPY, 400),
}
"""For each transport a copy that all ranks do at once, and how many times as long it may take.

200 device copies of an H200 are 10 GB/s, half of what two GPUs without NVLink exchange over PCIe;
an MPI library may stage by itself. Where the host stages, 30 pinned copies are below 2 GB/s.
"""


def below_floors(rows: Iterable[TimingRow]) -> list[str]:
    """The measurements of 64 MB and more that are below their transport's lowest rate, in words.

    Args:
        rows: Of all tables; those that compare a transport with the copies count.
    """
    medians = {(row.table, row.nbytes, row.rival): row.median for row in rows}
    found = []
    for (table, nbytes, rival), seconds in medians.items():
        transport = table.rpartition("_")[0]
        if transport not in FLOORS or nbytes < _LARGE or not rival.startswith(transport):
            continue
        copy, most = FLOORS[transport]
        limit = medians.get((table, nbytes, copy))
        if limit is not None and seconds > most * limit:
            found.append(
                f"{rival}, {table.rpartition('_')[2]} ranks, {size_text(nbytes)}: "
                f"{time_text(seconds)} is {seconds / limit:.0f} times the {copy} "
                f"({time_text(limit)}), and {most} times are the most: it does not work as it "
                "should; see asyncddp doctor --check"
            )
    return found
