"""Counts the CPU cores that this process may use, by affinity and container quota."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Count the physical cores that this process may use, capped by the container's quota."""
    found, processors = set(), os.sched_getaffinity(0)
    for number in processors:
        with contextlib.suppress(OSError):
            found.add(Path(_TOPOLOGY.format(number)).read_text())
    count = len(found) or len(processors)
    with contextlib.suppress(OSError, ValueError):
        limit, period = _QUOTA.read_text().split()  # "max" without a limit
        count = int(min(count, int(limit) / int(period)))
    return max(1, count)


def threads_per_rank(ranks: int) -> int:
    """Return OpenMP threads per rank when so many share this machine: cores / ranks, at least 1."""
    return max(1, cores() // max(1, ranks))
