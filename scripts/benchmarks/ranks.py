"""Runs of ``asyncddp run`` as child processes of a benchmark, ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Advance = Callable[[str], None]
"""Told how far a benchmark is."""

_GRACE = 10.0  # seconds in which a run that is ended takes its ranks along
_OUTPUT = 2000  # characters of a failed run's last output


class RunFailedError(RuntimeError):
    """Error of a run with a non-zero exit code; the message has its last output."""


def python_path() -> str:
    """Build the PYTHONPATH of a run: this package, then this process's own."""
    here = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([here, *(folder for folder in before if folder and folder != here)])


def rank_program(work: str, given: Mapping[str, Any]) -> list[str]:
    """Return the words with which every rank runs a function of this package (see ``rank``)."""
    return ["-m", "benchmarks.rank", work, json.dumps(given)]


def run_on_ranks(
    ranks: int,
    work: str,
    given: Mapping[str, Any],
    advance: Advance = lambda line: None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a function of this package on ranks of this machine.

    Args:
        ranks: How many.
        work: ``module:function``, the module named after ``benchmarks.``.
        given: The function's arguments.
        advance: Told each line that its first rank prints.
        environ: Variables besides those of this process.

    Returns:
        What the function gave on rank 0.

    Raises:
        RunFailedError: The run failed.
    """
    launch = [sys.executable, "-m", "asyncddp", "run", "-np", str(ranks)]
    return run_for_json([*launch, *rank_program(work, given)], advance, environ)


def run_for_json(
    command: Sequence[str],
    advance: Advance = lambda line: None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a command to its end, and read the JSON that it writes to the file that ``--out`` names.

    Raises:
        RunFailedError: It did not end with 0.
    """
    given = {**os.environ, "PYTHONPATH": python_path(), **(environ or {})}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words,
    ):
        out = Path(folder) / "found.json"
        with started([*command, "--out", str(out)], given, words) as child:
            for line in child.stdout or ():
                advance(line.rstrip("\n"))
            code = child.wait()
        if code != 0:
            raise RunFailedError(f"{' '.join(command)}\nended with {code}:\n{last_words(words)}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def last_words(words: IO[str]) -> str:
    """Return the end of what a run has written on stderr."""
    words.seek(0)
    return words.read()[-_OUTPUT:].strip()


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environ: Mapping[str, str],
    words: IO[str],
    output: IO[str] | int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own: Ctrl-C reaches it through us, once and in order."""
    child = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
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
