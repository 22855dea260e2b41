"""Starting a cluster, waiting for its engines, and stopping it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.cluster.folder import Folder, Record, needs
from asyncddp.launch.cluster.keeper import Task
from asyncddp.launch.cluster.plan import Plan
from asyncddp.launch.processes import kill_processes_of

__all__ = ["Running", "await_engines", "start", "stop"]

_END = 20.0  # seconds for a cluster to end when asked
_LOOK = 0.1  # seconds between two looks at what is going on


class Running:
    """A cluster that this process has started.

    Attributes:
        folder: Where it lives.
        plan: What it is.
    """

    def __init__(self, folder: Folder, plan: Plan, *, private: bool) -> None:
        self.folder, self.plan, self._private = folder, plan, private
        self._news: dict[str, Any] = {}
        self._rest = b""
        with folder.log("keeper").open("wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "asyncddp.launch.cluster.keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        task = Task(str(folder.path), plan, os.getpid(), private)
        self._tell(json.dumps(asdict(task)))

    def _tell(self, line: str) -> None:
        if self._keeper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._keeper.stdin.write(f"{line}\n".encode())
                self._keeper.stdin.flush()

    def ready(self, wait: float) -> bool:
        """Whether the controller is there; waits so many seconds at most.

        Raises:
            EnvironmentProblem: The cluster has ended, or another one runs in its place.
        """
        self._hear(wait)
        if "busy" in self._news:
            raise EnvironmentProblem(_twice(self.folder))
        if "ended" in self._news:
            raise EnvironmentProblem(f"the cluster has ended. {self._news['ended']}")
        if self._keeper.poll() is not None:
            said = self.folder.last_words("keeper")
            raise EnvironmentProblem(f"the cluster has ended; its keeper said:\n{said}")
        return "ready" in self._news

    def _hear(self, wait: float) -> None:
        stream = self._keeper.stdout
        if stream is None or stream.closed:
            return
        while select.select([stream], [], [], wait)[0]:
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                stream.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._keeper.wait(_LOOK)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._news.update(json.loads(line))
            wait = 0.0

    def release(self) -> None:
        """From now on the cluster goes on when this process ends."""
        self._tell("release")
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                stream.close()

    def wait(self) -> None:
        """Wait until the cluster has ended."""
        self._keeper.wait()

    def stop(self) -> None:
        """End it, and wait until nothing is left; harmless when called twice."""
        if self._keeper.poll() is None:
            self._keeper.terminate()
            try:
                self._keeper.wait(_END)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
                kill_processes_of("=".join(self.folder.mark))
        self._close_pipes()
        if self._private:
            shutil.rmtree(self.folder.path, ignore_errors=True)


def _twice(folder: Folder) -> str:
    name = folder.path.name.removeprefix("profile_")
    return (
        f"a cluster runs already under profile {name!r}: {folder.running() or 'it just began'}. "
        f"End it first, by 'asyncddp notebook stop --profile {name}', or give another --profile"
    )


def start(plan: Plan, folder: Folder | None = None, *, timeout: float = 120.0) -> Running:
    """Start a cluster's controller, and let its engines be started.

    Args:
        plan: The cluster.
        folder: The profile where it shall live; None for a folder that goes with it.
        timeout: Seconds for the controller to be ready.

    Returns:
        The cluster, which ends with this process unless it is released. Its engines may still be
        coming: see :func:`await_engines`.

    Raises:
        EnvironmentProblem: Another cluster runs there, or this one could not be started.
    """
    if folder is not None and folder.running() is not None:
        raise EnvironmentProblem(_twice(folder))
    try:
        import ipyparallel  # noqa: F401 - before anything is started
    except ImportError as problem:
        raise needs("ipyparallel") from problem
    private = folder is None
    place = folder or Folder(Path(tempfile.mkdtemp(prefix="asyncddp-cluster-"))).made()
    with contextlib.ExitStack() as undo:
        running = Running(place, plan, private=private)
        undo.callback(running.stop)
        until = time.monotonic() + timeout
        while not running.ready(_LOOK):
            if time.monotonic() > until:
                raise EnvironmentProblem(
                    f"the controller was not ready within {timeout:g} s; it said:\n"
                    f"{place.last_words('controller')}"
                )
        undo.pop_all()
    return running


def await_engines(
    running: Running,
    client: Any,
    *,
    timeout: float = 120.0,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Wait until every rank's engine answers.

    Args:
        running: The cluster.
        client: An ``ipyparallel.Client`` of it.
        timeout: Seconds to wait at most.
        progress: Called now and then with the number of engines that are there.

    Raises:
        EnvironmentProblem: The launcher has ended or the time is up; shows what the launcher said.
    """
    until = time.monotonic() + timeout
    while (count := len(client.ids)) < running.plan.ranks:
        progress(count)
        running.ready(_LOOK)
        if time.monotonic() > until:
            raise EnvironmentProblem(
                f"{count} of {running.plan.ranks} engines answered within {timeout:g} s; the "
                f"launcher said:\n{running.folder.last_words('engines')}"
            )
    progress(count)


def stop(folder: Folder, *, patience: float = _END) -> Record | None:
    """End the cluster that lives in a folder, and wait until nothing of it is left here.

    Returns:
        What ran; None where nothing did.

    Raises:
        EnvironmentProblem: It runs on another machine.
    """
    record = folder.running()
    if record is None:
        kill_processes_of("=".join(folder.mark))  # of a keeper that was killed
        return None
    if record.host != socket.gethostname():
        raise EnvironmentProblem(f"the cluster runs on {record.host}: stop it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    until = time.monotonic() + patience
    while folder.running() is not None:
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
            kill_processes_of(record.mark)
            break
        time.sleep(_LOOK)
    return record
