"""Memory limit of this process: the machine's memory, or its container's limit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Return the size of physical memory in bytes, or the container's limit if that is smaller."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        found = min(found, int(_LIMIT.read_text()))  # "max" without a limit
    return found
