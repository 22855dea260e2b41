"""Environment variable that distinguishes child processes of a rank from the rank itself.

Child processes inherit the launcher's variables, and would join the world as the same rank again.
Variables set anew by a launcher between rank and child belong to the child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from asyncddp.environments.launchers import LAUNCHERS, announcement_of
from asyncddp.errors import EnvironmentProblem

_MARKER = "ASYNCDDP_RANK_PROCESS"
_ANNOUNCEMENTS = [announcement_of(kind) for kind in LAUNCHERS if kind.run_variables]
"""Variables of launchers that distinguish their runs."""


def _announced(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [f"{name}={environ[name]}" for name in names if name in environ]


def mark_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Mark this process as the rank described by its launcher's variables."""
    told = [text for names in _ANNOUNCEMENTS for text in _announced(environ, names)]
    environ[_MARKER] = ";".join((str(os.getpid()), *told))


def unmark_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the marker: this process has left the world, and child processes may join it."""
    environ.pop(_MARKER, None)


def _forget_parent_rank(environ: MutableMapping[str, str]) -> bool:
    """Drop variables inherited from a rank; return whether no launcher has set new ones."""
    inherited = environ.pop(_MARKER, "").split(";")[1:]
    is_new = False
    for names in _ANNOUNCEMENTS:
        told = _announced(environ, names)
        is_new |= not set(told) <= set(inherited)
        for text in told if set(told) <= set(inherited) else ():
            del environ[text.partition("=")[0]]
    return bool(inherited) and not is_new


def environment_of_children(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for child processes, which must not act as this rank."""
    own = dict(environ)
    _forget_parent_rank(own)
    return own


def refuse_child_of_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise if a rank started this process, and no launcher has given it a rank of its own."""
    pid = environ.get(_MARKER, "").partition(";")[0]
    if pid in ("", str(os.getpid())) or not Path("/proc", pid).exists():
        return
    before = dict(environ)
    if _forget_parent_rank(environ):
        environ.update(before)
        raise EnvironmentProblem(
            f"init(): this process was started by a rank (process {pid}) and has inherited its "
            "place among the ranks, which it cannot take as well. Where processes import the "
            "script anew, as workers of a DataLoader do, put what it runs below "
            "if __name__ == '__main__': ; a program of its own is started by asyncddp run"
        )
