"""Builds the command that starts rank processes on this machine, and ends such processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil

import asyncddp
from asyncddp.launch.job import Job
from asyncddp.launch.launcher_discovery import find_launcher


def launch(ranks: int, *program: str) -> tuple[list[str], dict[str, str]]:
    """Build the command that starts a program on ranks of this machine, and its environment.

    There may be more ranks than cores. Settings of the library in this process's environment are
    left out.

    Raises:
        EnvironmentProblem: There is no MPI launcher, or none that is known.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCDDP_")}
    found = find_launcher(None, kept)
    job = Job(ranks, program, oversubscribe=True, environment=kept, root=os.geteuid() == 0)
    command = found.launcher.build_command(found.executable, job)
    home = str(Path(asyncddp.__file__).parents[1])  # also where it is not installed
    path = os.pathsep.join([home, *filter(None, [kept.get("PYTHONPATH")])])
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return list(command.arguments), {**kept, **command.environment, **added}


def session_processes(session: int) -> list[psutil.Process]:
    """List the live processes of a session, also those in process groups of their own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_session(process: subprocess.Popen[bytes], grace: float = 3.0) -> None:
    """End a process that was started in a new session, and all processes of the session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # lets a launcher take its ranks along
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    for process_left in session_processes(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process_left.kill()
    process.wait()
