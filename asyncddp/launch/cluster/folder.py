"""Where a cluster lives: an IPython profile, its lock and its record."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.packages import install_command

__all__ = ["Folder", "Record", "needs"]

_MARK = "ASYNCDDP_CLUSTER"
_TRIES = 5
_TAIL = 40  # lines of a log that a message shows


def needs(module: str) -> EnvironmentProblem:
    """What to say where a package for notebooks is missing."""
    return EnvironmentProblem(
        f"notebooks need {module}, which is not installed: {install_command('notebook')}"
    )


@dataclass(frozen=True)
class Record:
    """A cluster that runs.

    Attributes:
        pid: The keeper.
        host: The machine on which it runs.
        ranks: How many engines there are.
        since: When it was started, as of ``time.time()``.
        mark: ``NAME=value``, which all its processes have in their environment.
    """

    pid: int
    host: str
    ranks: int
    since: float
    mark: str

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S on %d %b %Y", time.localtime(self.since))
        return f"{self.ranks} ranks, started at {at} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Folder:
    """A cluster's IPython profile.

    Attributes:
        path: The profile's folder.
    """

    path: Path

    @classmethod
    def of_profile(cls, name: str) -> Folder:
        """The profile of that name among the user's own, made if there is none.

        Raises:
            ArgumentError: No profile can have that name.
            EnvironmentProblem: IPython is not installed.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise ArgumentError(
                f"profile: expected letters, digits, '_', '-' and '.', got {name!r}"
            )
        try:
            from IPython.paths import get_ipython_dir
        except ImportError as problem:
            raise needs("IPython") from problem
        return cls(Path(get_ipython_dir(), f"profile_{name}")).made()

    def made(self) -> Folder:
        """Make the folders that are missing; others cannot look into them."""
        for folder in (self.security, self.log("engines").parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    @property
    def security(self) -> Path:
        """Where keys are."""
        return self.path / "security"

    @property
    def client_file(self) -> Path:
        """What a client needs in order to connect."""
        return self.security / "ipcontroller-client.json"

    @property
    def engine_file(self) -> Path:
        """What an engine needs in order to connect."""
        return self.security / "ipcontroller-engine.json"

    @property
    def _record_file(self) -> Path:
        return self.security / "asyncddp-cluster.json"

    def log(self, name: str) -> Path:
        """Where the controller, the engines or the keeper write what they say."""
        return self.path / "log" / f"asyncddp-{name}.log"

    def last_words(self, name: str) -> str:
        """The end of a log."""
        with contextlib.suppress(OSError):
            lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_TAIL:])
        return ""

    @property
    def mark(self) -> tuple[str, str]:
        """A variable that all processes of a cluster have in their environment."""
        return _MARK, str(self.path)

    @contextlib.contextmanager
    def held(self, record: Record) -> Iterator[bool]:
        """Hold the folder while a cluster runs; gives False where another one holds it."""
        with self._lock_file() as descriptor:
            if not _locked(descriptor):
                yield False
                return
            self._record_file.write_text(json.dumps(asdict(record)), encoding="utf-8")
            try:
                yield True
            finally:
                self._record_file.unlink(missing_ok=True)

    def running(self) -> Record | None:
        """The cluster that runs here; None where there is none, or its keeper was killed."""
        with self._lock_file() as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self.record()
            return None

    def record(self) -> Record | None:
        """What was written of the latest cluster, unless it has ended in good order."""
        try:
            return Record(**json.loads(self._record_file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        descriptor = os.open(self.security / "asyncddp-cluster.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock a file, unless somebody holds it for longer than a look at it takes."""
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False
