"""Runs that a bench starts by itself: followed while they last, and ended with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["RunFailed", "on_this_machine", "python_path", "run"]

_GRACE = 10.0  # seconds in which a run that is ended takes its ranks along
_WORDS = 2000  # characters of a failed run's last words


class RunFailed(RuntimeError):  # noqa: N818 - it is a finding, not a mistake
    """A run ended with another code than 0; the message has its last words."""


def python_path() -> str:
    """Where the ranks of a run find this package, and whatever this process finds."""
    here = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([here, *(folder for folder in before if folder and folder != here)])


def on_this_machine(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package on ranks of this machine."""
    launch = [sys.executable, "-m", "asyncddp", "run", "-np", str(ranks)]
    return [*launch, "-m", f"benchmarks.{module}", *arguments]


def run(
    command: Sequence[str],
    advance: Callable[[str], None] = lambda line: None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run a command to its end.

    Args:
        command: The words.
        advance: Told each line of its output.
        environ: Variables besides those of this process.

    Raises:
        RunFailed: It did not end with 0.
    """
    given = {**os.environ, "PYTHONPATH": python_path(), **(environ or {})}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        with _started(command, given, words) as child:
            for line in child.stdout or ():
                advance(line.rstrip("\n"))
            code = child.wait()
        if code != 0:
            words.seek(0)
            last = words.read()[-_WORDS:].strip()
            raise RunFailed(f"{' '.join(command)}\nended with {code}:\n{last}")


@contextlib.contextmanager
def _started(
    command: Sequence[str], environ: Mapping[str, str], words: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own: Ctrl-C reaches it through us, once and in order."""
    child = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=words,
        text=True,
        start_new_session=True,
    )
    with child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    child.kill()
