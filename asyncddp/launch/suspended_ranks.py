"""Ranks suspended by a signal such as SIGSTOP, while other ranks run and wait for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

SUSPENDED_SECONDS = 1.5
"""Seconds after which a stopped rank of an elastic run is killed."""
_INTERVAL, _GAP = 0.1, 0.5  # seconds between two looks: at least, and where this one stood still


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal, and not by a debugger.

    Example:
        >>> import os
        >>> is_suspended(os.getpid())
        False
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"


class SuspendedRanks:
    """Record of the ranks that a signal has suspended, and since when.

    Time does not count in which all ranks are stopped, or their launcher, as by Ctrl-Z.
    """

    def __init__(self, stopped: Callable[[int], bool] = is_suspended) -> None:
        self._stopped, self._looked = stopped, 0.0
        self._since: dict[object, float] = {}

    def overdue(self, pids: Mapping[object, int], now: float) -> list[object]:
        """Return the ranks, given their processes, that have stood still for too long."""
        passed = now - self._looked
        if passed < _INTERVAL:
            return []
        self._looked = now
        stopped = {rank for rank, pid in pids.items() if self._stopped(pid)}
        if passed > _GAP or len(stopped) == len(pids):
            self._since.clear()
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        return [rank for rank, since in self._since.items() if now - since >= SUSPENDED_SECONDS]
