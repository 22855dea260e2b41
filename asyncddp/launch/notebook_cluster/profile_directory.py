"""IPython profile directory of a notebook cluster: connection files, logs, lock and processes."""

from __future__ import annotations

import contextlib
import fcntl
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec

from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package

_LOCK, _RECORD = "asyncddp-cluster.lock", "asyncddp-cluster.json"
_TRIES = 5
_TAIL = 40  # lines of a log that a message shows


def import_ipyparallel() -> Any:
    """Import ipyparallel, or raise EnvironmentProblem with its install line."""
    with needed_package("notebooks need ipyparallel", "notebook"):
        import ipyparallel
    return ipyparallel


@dataclass(frozen=True)
class ClusterRecord:
    """Record of a running notebook cluster, written into its IPython profile directory."""

    pid: int  # of its daemon, which runs on the host
    host: str
    ranks: int
    since: float  # its start, as of time.time()

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S on %d %b %Y", time.localtime(self.since))
        return f"{self.ranks} ranks, started at {at} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class ProfileDirectory:
    """IPython profile directory in which a notebook cluster keeps its files."""

    path: Path

    @classmethod
    def for_profile(cls, name: str) -> ProfileDirectory:
        """Return the directory of the user's named profile; create it if needed."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise ArgumentError(
                f"profile: expected letters, digits, '_', '-' and '.', got {name!r}"
            )
        with needed_package("notebooks need IPython", "notebook"):
            from IPython.paths import get_ipython_dir
        return cls(Path(get_ipython_dir(), f"profile_{name}")).create()

    def create(self) -> ProfileDirectory:
        """Create missing directories, readable by this user only."""
        for directory in (self.security, self.log("engines").parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    @property
    def security(self) -> Path:
        """Directory of the connection files, which contain keys."""
        return self.path / "security"

    @property
    def client_file(self) -> Path:
        """Connection file for clients."""
        return self.security / "ipcontroller-client.json"

    @property
    def engine_file(self) -> Path:
        """Connection file for engines."""
        return self.security / "ipcontroller-engine.json"

    def log(self, name: str) -> Path:
        """Return the log file of the controller, the engines or the daemon."""
        return self.path / "log" / f"asyncddp-{name}.log"

    def log_tail(self, name: str) -> str:
        """Return the last lines of a log."""
        with contextlib.suppress(OSError):
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_TAIL:])
        return ""

    @property
    def environment_marker(self) -> str:
        """``NAME=value`` of an environment variable set in all the cluster's processes."""
        return f"ASYNCDDP_CLUSTER={self.path}"

    @contextlib.contextmanager
    def lock(self, record: ClusterRecord) -> Iterator[bool]:
        """Lock the directory while a cluster runs; yield False if another one holds the lock."""
        with (self.security / _LOCK).open("a") as file:
            if not _try_lock(file):
                yield False
                return
            (self.security / _RECORD).write_bytes(msgspec.json.encode(record))
            try:
                yield True
            finally:
                (self.security / _RECORD).unlink(missing_ok=True)

    def running_cluster(self) -> ClusterRecord | None:
        """Return the running cluster's record; None without a cluster or a live daemon."""
        with (self.security / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(OSError, ValueError):
                    data = (self.security / _RECORD).read_bytes()
                    return msgspec.json.decode(data, type=ClusterRecord)
            return None


def _try_lock(file: TextIO) -> bool:
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False
