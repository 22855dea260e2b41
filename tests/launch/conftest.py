"""Real runs of the command line, whose processes are known wherever they are."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.launcher_discovery import find_launcher
from tests.support import RUN_LIMIT
from tests.support.processes import processes_of, warm_python, warm_script

LIMIT = RUN_LIMIT  # seconds for any run of these tests


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Runner:
    """Starts ``asyncddp run`` with a mark in the environment that every process inherits.

    ``command`` may be set: the words after ``python -m``.
    """

    def __init__(self, folder: Path) -> None:
        self.command = ("asyncddp", "run")
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, "ASYNCDDP_TEST_MARK": self.mark}
        self._children: list[subprocess.Popen[str]] = []

    def script(self, text: str) -> str:
        """A script in the test's folder."""
        path = self.folder / "script.py"
        path.write_text(text)
        return str(path)

    def warm(self, text: str) -> list[str]:
        """The words that run a script as ``asyncddp run`` does, where it imports torch.

        Each rank is forked of a process that has done so.
        """
        return warm_script(self.script(text))

    def start(self, *arguments: str, **given: object) -> subprocess.Popen[str]:
        """Start it and come back at once."""
        child = subprocess.Popen(
            [sys.executable, "-m", *self.command, *arguments],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "env": self.environment,
                "cwd": self.folder,
                **given,
            },
        )
        self._children.append(child)
        return child

    def finish(self, child: subprocess.Popen[str], given: str | None = None) -> Finished:
        """Wait for its end."""
        start = time.monotonic()
        stdout, stderr = child.communicate(given, timeout=LIMIT)
        return Finished(child.returncode, stdout, stderr, time.monotonic() - start)

    def __call__(self, *arguments: str) -> Finished:
        return self.finish(self.start(*arguments))

    def processes(self) -> list[psutil.Process]:
        """Whatever of the run is still there."""
        found = processes_of(self.mark)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get("ASYNCDDP_TEST_MARK") == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, seconds: float) -> list[psutil.Process]:
        """Give the processes that are left after so long."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def close(self) -> None:
        """End whatever a failed test has left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for child in self._children:
            child.communicate(timeout=LIMIT)


def pytest_itemcollected(item):
    """Mark each test that starts the command line."""
    if "run" in item.fixturenames:
        item.add_marker(pytest.mark.launches)


@pytest.fixture
def run(tmp_path):
    try:
        find_launcher(None, os.environ)
    except EnvironmentProblem as problem:
        pytest.skip(f"needs an MPI launcher: {problem}")
    runner = Runner(tmp_path)
    yield runner
    runner.close()


@pytest.fixture
def warm_run(run, monkeypatch):
    """``asyncddp run`` as commands start it themselves forks ranks that have imported torch."""
    monkeypatch.setattr(sys, "executable", warm_python())
    return run
