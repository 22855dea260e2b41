"""What a test must not leave behind: threads, child processes, environment variables."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncddp.testing.process_pool import LAUNCHER_PIDS

__all__ = ["Traces"]

_NOT_OURS = (
    *("CUDA_", "HYPOTHESIS_", "OMPI_", "PMIX_", "PRTE_", "PYTEST_"),
    "TORCHINDUCTOR_",
)
"""Variables that pytest, MPI, hypothesis and torch set for themselves, and torch for CUDA."""


_DAEMONS = {"orted"}
"""Open MPI 4 starts one beside a process without launcher, until that ends."""


def _children() -> set[int]:
    """Ids of the processes that this one has started and not yet waited for."""
    before = None
    while (now := _listed()) != before:  # a process that ends meanwhile may hide the one after it
        before = now
    return now


def _listed() -> set[int]:
    """What the kernel lists for each thread; psutil, which looks at all processes, takes long."""
    tasks = Path("/proc/self/task")
    try:
        lists = [(task / "children").read_text() for task in tasks.iterdir()]
    except FileNotFoundError:  # a thread has ended meanwhile, or the kernel keeps no such lists
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for pids in lists for pid in pids.split()}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


@dataclass(frozen=True)
class Traces:
    """What there is at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    variables: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Traces:
        """Look."""
        children = _children() - LAUNCHER_PIDS
        ours = {pair for pair in os.environ.items() if not pair[0].startswith(_NOT_OURS)}
        return cls(frozenset(threading.enumerate()), frozenset(children), frozenset(ours))

    def left(self, grace: float = 2.0) -> list[str]:
        """What has come since and does not go within ``grace`` seconds, in words."""
        deadline = time.monotonic() + grace
        while (found := self._new()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _new(self) -> list[str]:
        now = Traces.now()
        children = {pid: _name(pid) for pid in now.children - self.children}
        names = {key for key, _ in now.variables ^ self.variables}
        return [
            *(f"thread {thread.name}" for thread in now.threads - self.threads),
            *(
                f"child process {pid}, {name}"
                for pid, name in children.items()
                if name not in _DAEMONS
            ),
            *(f"environment variable {name}" for name in sorted(names)),
        ]
