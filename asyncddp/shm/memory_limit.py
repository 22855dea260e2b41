"""Counts the memory that this machine, or the container of this process, has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Return the bytes of physical memory, capped by the container's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        found = min(found, int(_LIMIT.read_text()))  # "max" without a limit
    return found
