"""Header of a report, collected by a run that a benchmark has started itself."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from benchmarks.machine_info import header
from benchmarks.tables import RankGroup

__all__ = ["OF_ONE_RUN", "facts_of_run"]

OF_ONE_RUN = ("ranks", "placement", "load_before")


def facts_of_run() -> dict[str, Any]:
    """Machine and versions, without what differs from run to run; collective."""
    facts = header(RankGroup(MPI.COMM_WORLD, None))
    return {key: value for key, value in facts.items() if key not in OF_ONE_RUN}
