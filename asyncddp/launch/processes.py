"""The processes of a run on this machine: which there are, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["die_with_parent", "kill_processes_of", "processes_of"]

_PR_SET_PDEATHSIG = 1


def processes_of(marker: str) -> list[int]:
    """Process ids on this machine that have a variable in their environment; Linux only.

    Args:
        marker: ``NAME=value``, unique to a run, so that its processes are found wherever they are
            in the tree of processes.
    """
    wanted, found = marker.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_processes_of(marker: str) -> None:
    """Kill every process of a run, and those that they start meanwhile."""
    for _ in range(3):
        left = processes_of(marker)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def die_with_parent() -> Callable[[], object] | None:
    """What a process calls to be ended when its parent is killed; None where only Linux could."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
