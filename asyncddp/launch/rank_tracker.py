"""Tracker of this machine's rank processes: waiting in ``init()``, ended or lost.

Every rank writes a file ``started-<rank>`` into the report directory and renames it to
``ended-<rank>`` when it ends regularly; while it waits in ``init()`` there is ``joining-<rank>``,
and ``joined-<rank>`` afterwards. A pidfd reports the end of each process at once, so that the first
lost rank is known.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path


def record_start(report_directory: str, rank: str) -> None:
    """Write the start file of this rank; do nothing on machines without the directory."""
    file = Path(report_directory, f"started-{rank}")
    with contextlib.suppress(OSError):
        file.write_text(f"{os.getpid()} {socket.gethostname()}")


def record_end(report_directory: str, rank: str) -> None:
    """Rename the start file of this rank to record that it has ended normally."""
    with contextlib.suppress(OSError):
        Path(report_directory, f"started-{rank}").rename(Path(report_directory, f"ended-{rank}"))


def _rank_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _is_gone(path: Path) -> bool:
    pid, host = path.read_text().split()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return host == socket.gethostname()
    return False


class RankTracker:
    """Tracker of the rank processes on this machine, through their start files and pidfds.

    In an elastic run, ranks that have reported a failure count as lost, too.
    """

    def __init__(self, report_directory: Path, *, elastic: bool = False) -> None:
        self._report_directory, self._elastic = report_directory, elastic
        self._known: set[int] = set()
        self._running: dict[int, int] = {}  # rank to pidfd
        self._pidfds: list[int] = []
        self._terminating = False
        self._terminated: set[int] = set()  # got SIGTERM
        self.lost: list[int] = []  # ended irregularly, before any failure report; in order

    def new_processes(self) -> dict[int, int]:
        """Return new ranks with their pidfds, which become readable when a process ends."""
        found = {}
        for rank, pid in self._started():
            if rank in self._known:
                continue
            try:
                found[rank] = self._running[rank] = os.pidfd_open(pid)
            except ProcessLookupError:  # it ended between two polls
                self.on_process_exit(rank)
            self._known.add(rank)
            if self._terminating and rank not in self._terminated:
                self._send(rank, pid, signal.SIGTERM)
        self._pidfds += found.values()
        return found

    def send(self, number: int) -> bool:
        """Send a signal to the ranks that run on this machine; return False if there are none.

        Ranks that started since the last poll get the signal too; SIGTERM also reaches later ranks.
        A signal handler may call this.
        """
        self._terminating |= number == signal.SIGTERM
        return any([self._send(rank, pid, number) for rank, pid in self._started()])

    def _send(self, rank: int, pid: int, number: int) -> bool:
        if number == signal.SIGTERM:
            self._terminated.add(rank)
        with contextlib.suppress(ProcessLookupError):
            if rank in self._running:
                signal.pidfd_send_signal(self._running[rank], number)
                return True
            if rank not in self._known:
                os.kill(pid, number)
                return True
        return False

    def _started(self) -> list[tuple[int, int]]:
        """Return rank and process id from each start file of this machine."""
        if not hasattr(os, "pidfd_open"):
            return []
        started = []
        for path in self._report_directory.glob("started-*"):
            with contextlib.suppress(OSError, ValueError):  # half written, or already gone
                pid, host = path.read_text().split()
                if host == socket.gethostname():
                    started.append((_rank_of(path), int(pid)))
        return started

    def on_process_exit(self, rank: int) -> bool:
        """Record that a rank's process has ended; return False: stop watching its pidfd."""
        self._running.pop(rank, None)
        began = (self._report_directory / f"started-{rank}").exists()
        if began and not self.has_ending_report():
            self.lost.append(rank)
        return False

    def waiting_in_init(self) -> tuple[int, ...]:
        """Return the ranks waiting in ``init()`` while another rank's process has ended."""
        joining = {_rank_of(path) for path in self._report_directory.glob("joining-*")}
        gone = {*self.lost, *self.ended()} if joining else set()
        return tuple(sorted(joining - gone)) if gone else ()

    def is_lost_for_good(self) -> bool:
        """Return whether all local ranks have ended, one abnormally after ``init()``.

        MPI ends the other ranks in that case, and its launcher should end soon.
        """
        joined = any((self._report_directory / f"joined-{rank}").exists() for rank in self.lost)
        return joined and not self._running

    def ended(self) -> tuple[int, ...]:
        """Return the ranks of this machine that ended normally and whose process is gone."""
        files = self._report_directory.glob("ended-*")
        return tuple(sorted(_rank_of(path) for path in files if _is_gone(path)))

    def has_ending_report(self) -> bool:
        """Return whether a rank has written a failure report that ends the run."""
        return not self._elastic and any(self._report_directory.glob("rank-*.json"))

    def close(self) -> None:
        """Close the pidfds."""
        while self._pidfds:
            os.close(self._pidfds.pop())
