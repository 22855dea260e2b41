"""Marker in a rank's environment, by which processes that it starts are told from the rank itself.

They inherit what its launcher has announced, and would join the world as that rank once more. What
a launcher between has announced anew is theirs.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from asyncddp.errors import EnvironmentProblem

MARKER = "ASYNCDDP_RANK_PROCESS"
_ANNOUNCEMENTS = (  # of one kind of launcher each, with what tells its runs apart
    (
        *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ),
)


def _announced(environ: MutableMapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [f"{name}={environ[name]}" for name in names if name in environ]


def mark_rank(environ: MutableMapping[str, str]) -> None:
    """Mark this process as the rank that its launcher has announced."""
    told = [text for names in _ANNOUNCEMENTS for text in _announced(environ, names)]
    environ[MARKER] = ";".join((str(os.getpid()), *told))


def forget_parent_rank(environ: MutableMapping[str, str]) -> bool:
    """Drop what is inherited from a rank, and return whether nothing was announced since."""
    inherited = environ.pop(MARKER, "").split(";")[1:]
    is_new = False
    for names in _ANNOUNCEMENTS:
        told = _announced(environ, names)
        is_new |= not set(told) <= set(inherited)
        for text in told if set(told) <= set(inherited) else ():
            del environ[text.partition("=")[0]]
    return bool(inherited) and not is_new


def refuse_child_of_rank(environ: MutableMapping[str, str]) -> None:
    """Raise if this process was started by a rank, and no launcher has made it another one."""
    pid = environ.get(MARKER, "").partition(";")[0]
    if pid in ("", str(os.getpid())) or not Path("/proc", pid).exists():
        return
    before = dict(environ)
    if forget_parent_rank(environ):
        environ.update(before)
        raise EnvironmentProblem(
            f"init(): this process was started by a rank (process {pid}) and has inherited its "
            "place among the ranks, which it cannot take as well. Where processes import the "
            "script anew, as workers of a DataLoader do, put what it runs below "
            "if __name__ == '__main__': ; a program of its own is started by asyncddp run"
        )
