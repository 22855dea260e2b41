"""Limits of this machine for a run: usable CPU cores, and the number of open files."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from asyncddp.errors import EnvironmentProblem

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
    """Return OpenMP threads per rank on this machine: cores / ranks, but at least 1."""
    return max(1, cores() // max(1, ranks))


_LEAST = 64  # a launcher of two ranks has 25 open, each of them 24
_EACH = 8  # more for every further rank


def ensure_open_files(ranks: int) -> None:
    """Raise the soft limit on open files as ranks need it; raise an error if it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LEAST + _EACH * ranks
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _LEAST:
        raise EnvironmentProblem(
            f"a process may open {hard} files here, and a run needs at least {_LEAST}. "
            "Raise the limit, as by ulimit -n 1024 in the shell that starts it"
        )
