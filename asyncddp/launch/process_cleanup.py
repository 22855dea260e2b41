"""Finds and kills all processes of a run on this machine, also those whose parent has died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def find_processes(marker: str) -> list[int]:
    """Return the ids of all processes that have ``NAME=value`` in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):  # Linux only
        with contextlib.suppress(OSError):
            if marker.encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_processes(marker: str) -> None:
    """Kill every process with the marker in its environment, and their new children."""
    for _ in range(3):
        left = find_processes(marker)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def parent_death_setter() -> Callable[[], object] | None:
    """Return a function that makes a process get SIGTERM when its parent dies; None off Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
