"""Counts the CPU cores that this process may use, by affinity and container quota."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def _processors() -> set[int]:
    """Return the logical processors in this process's CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cores() -> int:
    """Count the physical cores that this process may use, capped by the container's quota."""
    found = set()
    for number in _processors():
        with contextlib.suppress(OSError):
            found.add(Path(_TOPOLOGY.format(number)).read_text())
    count = len(found) or len(_processors())
    with contextlib.suppress(OSError, ValueError):
        limit, period = _QUOTA.read_text().split()  # "max" without a limit
        count = int(min(count, int(limit) / int(period)))
    return max(1, count)


def threads_per_rank(ranks: int) -> int:
    """Return OpenMP threads per rank when so many share this machine: cores / ranks, at least 1."""
    return max(1, cores() // max(1, ranks))
