"""Which ranks on this machine have started, which have left, and in which order.

Every rank that :mod:`asyncddp.launch.rank` runs signs in with a file ``started-<rank>`` and signs
out by renaming it to ``ended-<rank>``; while it waits in ``init()`` for the others there is a file
``joining-<rank>``. Linux tells at once when one of them ends, so the first that left without
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
        Path(folder, f"started-{rank}").rename(Path(folder, f"ended-{rank}"))


def _rank_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


class RollCall:
    """Watches the ranks of this machine.

    Args:
        folder: Where they sign in and leave their reports.

    Attributes:
        lost: Ranks that left without signing out before any rank had reported a failure, in order.
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
                    try:
                        found[rank] = os.pidfd_open(int(pid))
                    except ProcessLookupError:  # it was there for less than a look
                        self.left(rank)
        self._open.update(found)
        return found

    def left(self, rank: int) -> bool:
        """Take note that a rank's process has ended; False, for there is no more to watch."""
        if (self._folder / f"started-{rank}").exists() and not self.has_reports():
            self.lost.append(rank)
        return False

    def stranded(self) -> tuple[int, ...]:
        """Ranks inside ``init()``, which waits for all, while another one's process has ended."""
        joining = {_rank_of(path) for path in self._folder.glob("joining-*")}
        gone = {*self.lost, *self.ended()} if joining else set()
        return tuple(sorted(joining - gone)) if gone else ()

    def ended(self) -> tuple[int, ...]:
        """Ranks of this machine that have signed out, and whose process has ended."""
        return tuple(sorted(filter(self._is_gone, map(_rank_of, self._folder.glob("ended-*")))))

    def _is_gone(self, rank: int) -> bool:
        pid, host = (self._folder / f"ended-{rank}").read_text().split()
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return host == socket.gethostname()
        return False

    def has_reports(self) -> bool:
        """Whether a rank has left a report of its failure."""
        return any(self._folder.glob("rank-*.json"))

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}
