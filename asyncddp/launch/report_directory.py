"""Directory into which ranks write their reports for ``asyncddp run``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncddp.errors import EnvironmentProblem

_PREFIX, _LOCK = "asyncddp-", "run.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROOM = 1 << 16  # bytes that must be free: launchers keep their sockets and files there too


@contextlib.contextmanager
def report_directory() -> Iterator[Path]:
    """Yield a temporary report directory, and remove directories left by killed runs.

    A run holds the lock of its directory until it ends.
    """
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
        Path(name, _LOCK).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(_machine())
        lock.flush()
        for folder in Path(name).parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_left(folder)
        yield Path(name)


def _remove_if_left(folder: Path) -> None:
    """Remove a directory if this user's run on this machine left it, and its lock is free."""
    with (folder / _LOCK).open() as lock:
        if folder.lstat().st_uid == os.geteuid() and lock.read() == _machine():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def _machine() -> str:
    return f"{socket.gethostname()} {_BOOT_ID.read_text() if _BOOT_ID.exists() else ''}"


def check_folders(environment: Mapping[str, str]) -> None:
    """Raise if the working directory is gone, or if TMPDIR is not writable."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem(
            "the working directory has been removed: change to one that exists (cd)"
        ) from error
    folder = environment.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
    except FileNotFoundError:  # a launcher makes it
        return
    except OSError as problem:
        raise EnvironmentProblem(
            f"TMPDIR: nothing can be written into {folder!r} ({problem.strerror}), where launchers "
            "keep their files. Free some space there, or set TMPDIR to another folder"
        ) from problem
