"""Which ranks on this machine have started, which have left, and in which order.

Every rank that :mod:`asyncddp.launch.rank` runs signs in with a file ``started-<rank>`` and signs
out by removing it. Linux tells at once when one of them ends, so the first that left without
signing out is known even where the launcher kills the others and does not say who was first.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

__all__ = ["RollCall", "sign_in", "sign_out"]


def sign_in(folder: str, rank: str) -> None:
    """Say that this process runs a rank; another machine, without the folder, says nothing."""
    with contextlib.suppress(OSError):
        Path(folder, f"started-{rank}").write_text(f"{os.getpid()} {socket.gethostname()}")


def sign_out(folder: str, rank: str) -> None:
    """Say that this rank has ended as it should."""
    with contextlib.suppress(OSError):
        Path(folder, f"started-{rank}").unlink()


class RollCall:
    """Watches the ranks of this machine.

    Args:
        folder: Where they sign in and leave their reports.

    Attributes:
        lost: Ranks that left without signing out, in order.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[int] = set()
        self._open: dict[int, int] = {}
        self.lost: list[int] = []

    def newcomers(self) -> dict[int, int]:
        """Rank and file descriptor, readable once it ends, of those that are seen first now."""
        if not hasattr(os, "pidfd_open"):
            return {}
        found = {}
        for path in self._folder.glob("started-*"):
            rank = int(path.name.removeprefix("started-"))
            if rank in self._known:
                continue
            with contextlib.suppress(OSError, ValueError):  # half written, or already gone
                pid, host = path.read_text().split()
                self._known.add(rank)
                if host == socket.gethostname():
                    found[rank] = os.pidfd_open(int(pid))
        self._open.update(found)
        return found

    def left(self, rank: int) -> bool:
        """Take note that a rank's process has ended; False, for there is no more to watch."""
        if (self._folder / f"started-{rank}").exists() and rank not in self.lost:
            self.lost.append(rank)
        return False

    def has_reports(self) -> bool:
        """Whether a rank has left a report of its failure."""
        return any(self._folder.glob("rank-*.json"))

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}
