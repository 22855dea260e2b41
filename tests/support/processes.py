"""Run a command to its end, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncddp.testing.process_pool import LAUNCHER_PIDS, end_session, session_processes
from tests.support.warm_ranks import WarmServer

__all__ = [
    "REPO",
    "RUN_LIMIT",
    "Finished",
    "environment",
    "mpirun",
    "processes_of",
    "run_on_mpirun",
    "run_to_end",
    "warm_python",
    "warm_script",
    "warm_server",
]

REPO = Path(__file__).resolve().parents[2]

RUN_LIMIT = 300.0
"""Seconds after which a command that a test runs counts as hanging, on a busy machine too."""

FRAMEWORKS = ("lightning.pytorch", "sklearn.datasets", "transformers.trainer")
"""What takes each rank of examples and of frameworks seconds to import, where it is installed.

They import matplotlib, which chooses its backend then: a notebook's kernel wants to be without.
"""

_servers: dict[bool, WarmServer] = {}


@dataclass(frozen=True)
class Finished:
    """A command that has ended, by itself or not.

    Attributes:
        code: Exit code; negative: the signal that ended it.
        stdout, stderr: What it printed.
        seconds: How long it took.
        ended: When it ended, as of ``time.time()``.
        timed_out: Whether it had to be ended.
        left: Command lines of processes that outlived it by two seconds.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    ended: float
    timed_out: bool
    left: tuple[str, ...]

    def __str__(self) -> str:
        ending = "was ended" if self.timed_out else f"ended with {self.code}"
        return (
            f"{ending} after {self.seconds:.1f} s, left {list(self.left)}\n"
            f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"
        )


def mpirun(ranks: int, *command: str) -> list[str]:
    """The command line that starts ``command`` on ranks of this machine, quietly."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else "mpirun"
    settings = ["--map-by", ":OVERSUBSCRIBE", "--mca", "osc", "^ucx"]
    return [found, *settings, "-np", str(ranks), *command]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, fit for ``mpirun`` as root; without what is set for us alone."""
    ours = ("ASYNCDDP_", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {
        **kept,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **(more or {}),
    }


def _command_lines(processes: Sequence[psutil.Process]) -> tuple[str, ...]:
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return tuple(lines)


def warm_server(frameworks: bool = False) -> WarmServer:
    """The server of warm ranks, which stays up until the tests end.

    Args:
        frameworks: One whose ranks have :data:`FRAMEWORKS` imported as well.
    """
    if frameworks not in _servers:
        begun = (warm_server().command(), FRAMEWORKS) if frameworks else ()
        server = _servers[frameworks] = WarmServer(environment(), *begun)
        LAUNCHER_PIDS.add(server.pid)
    return _servers[frameworks]


def warm_script(*words: str, frameworks: bool = False) -> list[str]:
    """The words after ``asyncddp run`` with which it runs a script as ever, but with warm ranks."""
    return [warm_server(frameworks).python, "-m", "asyncddp.launch.rank", *words]


def warm_python(frameworks: bool = False) -> str:
    """A Python of which a program's ``sys.executable -m asyncddp run`` starts warm ranks."""
    return str(Path(warm_server(frameworks).environment, "bin", "python"))


def processes_of(run: int | str) -> list[psutil.Process]:
    """Processes of a run: those of its session, and its ranks that were forked warm.

    Args:
        run: Its session, or the mark in its environment, by which its warm ranks alone are known.
    """
    found = session_processes(run) if isinstance(run, int) else []
    for server in _servers.values():
        for rank in server.sessions_of(run):
            found += session_processes(rank)
    return found


def _outlived(session: int, grace: float = 2.0) -> tuple[str, ...]:
    deadline = time.monotonic() + grace
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return _command_lines(processes_of(session))


def run_to_end(
    command: Sequence[str],
    *,
    timeout: float = RUN_LIMIT,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a command in a session of its own; past ``timeout`` seconds end all of it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started, timed_out = time.monotonic(), False
        process = subprocess.Popen(
            command,
            env=environment(environ),
            cwd=cwd or REPO,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds, ended = time.monotonic() - started, time.time()
        left = () if timed_out else _outlived(process.pid)
        end_session(process)
        for process_left in processes_of(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process_left.kill()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
        return Finished(process.returncode, texts[0], texts[1], seconds, ended, timed_out, left)


def run_on_mpirun(
    ranks: int,
    script: str,
    folder: Path,
    *,
    timeout: float = RUN_LIMIT,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    warm: bool = True,
) -> Finished:
    """Run the text of a Python script on ranks under ``mpirun`` to its end.

    Args:
        ranks: How many.
        script: The script's text.
        folder: Where to put it, such as ``tmp_path``.
        timeout: Seconds after which all of it is ended.
        environ: Further environment variables.
        options: Further options of ``mpirun``.
        warm: Fork the ranks of a process that has imported torch and the library; False starts a
            Python for each, as users do, where importing is what is tested.
    """
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    program = warm_server().command(str(path)) if warm else [sys.executable, str(path)]
    launcher, *rest = mpirun(ranks, *program)
    return run_to_end([launcher, *options, *rest], timeout=timeout, environ=environ)
