"""Sessions of IPython in this process, and clusters whose processes are known by a mark."""

import contextlib
import os
import signal
import time
import uuid

import psutil
import pytest

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.launcher_discovery import find_launcher
from tests.support.processes import processes_of
from tests.support.session import open_session


@pytest.fixture(scope="module")
def session():
    """An IPython session of its own, without history."""
    with open_session() as opened:
        yield opened


class Marked:
    """The processes that have a variable in their environment."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        self.environment = {"ASYNCDDP_TEST_MARK": self.mark}

    def processes(self):
        """Those that are there."""
        found = processes_of(self.mark)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get("ASYNCDDP_TEST_MARK") == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def lines(self):
        """Their command lines."""
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return lines

    def one(self, word):
        """The one with that word in its command line."""
        return next(process for process in self.processes() if word in " ".join(process.cmdline()))

    def left(self, seconds=60.0):
        """What is still there after so long."""
        end = time.monotonic() + seconds
        while (lines := self.lines()) and time.monotonic() < end:
            time.sleep(0.05)
        return lines

    def end(self):
        """End what a failed test has left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


@pytest.fixture
def marked(monkeypatch):
    """Marks all processes that the test starts."""
    mark = Marked()
    monkeypatch.setenv("ASYNCDDP_TEST_MARK", mark.mark)
    yield mark
    mark.end()


@pytest.fixture(scope="session")
def mpi():
    """Skips where ranks cannot be started."""
    pytest.importorskip("ipyparallel")
    try:
        find_launcher(None, os.environ)
    except EnvironmentProblem as problem:
        pytest.skip(f"needs an MPI launcher: {problem}")
