"""Description of the machine and software on which a benchmark ran."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncddp
from asyncddp.shm.memory_limit import memory_limit
from benchmarks.tables import RankGroup


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _caches() -> str:
    """Return the sizes of a core's caches, such as ``"L2 1024K, L3 32768K"``."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, size = ((folder / name).read_text().strip() for name in ("level", "size"))
        if level in ("2", "3"):
            found.append(f"L{level} {size}")
    return ", ".join(found) or "not told"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git"
    return done.stdout.strip()


def oversubscribed(world: RankGroup) -> bool:
    """Return True if there are more ranks than cores; collective."""
    placed = world.comm.allgather(os.sched_getaffinity(0))
    return len(set().union(*placed)) < world.size


def machine_facts() -> dict[str, Any]:
    """Describe machine and versions, without what differs between ranks."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "caches": _caches(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_limit() / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "asyncddp": f"{asyncddp.__version__} ({_commit()})",
    }


def header(world: RankGroup) -> dict[str, Any]:
    """Describe machine, MPI, versions and the ranks' placement; collective."""
    from asyncddp.transport.mpi import runtime as mpi_library  # loads MPI

    placed = world.comm.allgather(sorted(os.sched_getaffinity(0)))
    facts = mpi_library.describe_mpi()
    bound = all(len(place) == 1 for place in placed) and len({p[0] for p in placed}) == world.size
    return {
        **machine_facts(),
        "mpi": f"{facts['vendor']} {facts['version']}, {facts['thread_level']}",
        "mpi4py": facts["mpi4py"],
        "transport": asyncddp.current().transport.name,
        "ranks": world.size,
        "placement": "each bound to a core of its own" if bound else "not bound",
        "threads_per_rank": torch.get_num_threads(),
    }


OF_ONE_RUN = ("ranks", "placement", "load_before")
"""What differs from run to run."""


def facts_of_run(world: RankGroup | None = None) -> dict[str, Any]:
    """Describe machine and versions, without what differs from run to run; collective."""
    from mpi4py import MPI

    facts = header(world or RankGroup(MPI.COMM_WORLD, None))
    return {key: value for key, value in facts.items() if key not in OF_ONE_RUN}
