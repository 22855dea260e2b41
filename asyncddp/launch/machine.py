"""What this machine has, asked of the operating system alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["cores", "threads_for"]

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def _processors() -> set[int]:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _quota() -> float:
    """Processors' worth of time that the container may use; infinite where nothing limits it."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = _QUOTA.read_text().split()
        return float("inf") if limit == "max" else int(limit) / int(period)
    return float("inf")


def cores() -> int:
    """Physical cores that this process may use, counting a container's quota.

    Example:
        >>> cores() >= 1
        True
    """
    found = set()
    for number in _processors():
        with contextlib.suppress(OSError):
            found.add(Path(_TOPOLOGY.format(number)).read_text())
    count = len(found) or len(_processors())
    return max(1, int(min(count, _quota())))


def threads_for(ranks: int) -> int:
    """Threads for each rank where so many share this machine: cores / ranks, at least 1."""
    return max(1, cores() // max(1, ranks))
