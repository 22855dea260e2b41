"""The report's header, as a run that a bench has started by itself finds it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from benchmarks.contract import World
from benchmarks.machine import header

__all__ = ["OF_ONE_RUN", "facts_of_run"]

OF_ONE_RUN = ("ranks", "placement", "load_before")


def facts_of_run() -> dict[str, Any]:
    """Machine and versions, without what differs from run to run; collective."""
    facts = header(World(MPI.COMM_WORLD, None))
    return {key: value for key, value in facts.items() if key not in OF_ONE_RUN}
