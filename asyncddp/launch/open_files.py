"""Limit of open files of a process, which everything that it starts inherits."""

from __future__ import annotations

import resource

from asyncddp.errors import EnvironmentProblem

_LEAST = 64  # a launcher of two ranks has 25 open, each of them 24
_EACH = 8  # more for every further rank


def ensure_open_files(ranks: int) -> None:
    """Raise the soft limit as far as so many ranks need it; an error where even few are refused."""
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
