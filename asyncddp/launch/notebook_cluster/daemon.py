"""Daemon of a notebook cluster: starts and stops ipyparallel's controller and engines.

It gets its configuration through a pipe from the process that has started it, its owner, and sends
status messages back. Until it receives ``"release"``, it ends when its owner does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from asyncddp.environments.rank_process_marker import environment_of_children
from asyncddp.launch.notebook_cluster.cluster_spec import (
    ENGINE_MODULE,
    MAX_MISSED_HEARTBEATS,
    ClusterSpec,
)
from asyncddp.launch.notebook_cluster.profile_directory import ClusterRecord, ProfileDirectory
from asyncddp.launch.rank_processes import RankProcesses, end_process

_POLL_INTERVAL = 0.1  # seconds between two checks of the children
_CONTROLLER_TIMEOUT = 60.0  # seconds for the controller to write its connection files
_HEARTBEAT_PERIOD = 500  # milliseconds; an engine is registered with its first heartbeat
_SHUTDOWN_TIMEOUT = 4.0  # seconds for engines, and then for the controller, to end when asked


class _StopRequested(Exception):  # noqa: N818 - no error
    """Exception: the daemon was asked to stop the cluster, or its owner process has ended."""


class _ChildExited(Exception):  # noqa: N818 - the message says what has ended
    """Exception: the ipyparallel controller or the engines have exited unexpectedly."""


class ClusterDaemon:
    """Daemon of a notebook cluster: parent process of its ipyparallel controller and engines."""

    _profile_directory: ProfileDirectory
    _spec: ClusterSpec
    _owner: int | None

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._profile_directory, self._spec, self._owner, self._private = pipe.recv()
        self._stopping = False
        self._processes = RankProcesses(marker=self._profile_directory.environment_marker)

    def run(self) -> int:
        """Run the cluster until it is asked to stop; return an exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        record = ClusterRecord(os.getpid(), socket.gethostname(), self._spec.ranks, time.time())
        with self._profile_directory.lock(record) as mine:
            if not mine:
                self._send_status(busy="")
                return 1
            self._processes.kill_descendants()  # left by a daemon that was killed
            try:
                self._run_children()
            except _StopRequested:
                return 0
            except _ChildExited as end:
                self._send_status(ended=str(end))
                return 1
            finally:
                self._close()
        return 0

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _run_children(self) -> None:
        files = (self._profile_directory.client_file, self._profile_directory.engine_file)
        profile = f"--profile-dir={self._profile_directory.path}"
        for file in files:
            file.unlink(missing_ok=True)
        address = self._spec.address
        self._start(
            *("controller", "ipyparallel.controller", "--usethreads", profile),
            *("--IPController.client_ip=127.0.0.1", f"--IPController.engine_ip={address}"),
            *(f"--location={address}", f"--IPController.enable_curve={self._spec.encrypted}"),
            f"--HeartMonitor.period={_HEARTBEAT_PERIOD}",
            f"--HeartMonitor.max_heartmonitor_misses={MAX_MISSED_HEARTBEATS}",
        )
        until = time.monotonic() + _CONTROLLER_TIMEOUT
        while not all(_is_complete_json(file) for file in files):
            self._step()
            if time.monotonic() > until:
                raise _ChildExited(
                    self._log_message("controller", f"not ready after {_CONTROLLER_TIMEOUT:g} s")
                )
        self._send_status(ready=str(files[0]))
        self._start(
            *("engines", "asyncddp", "run", *self._spec.options),
            *("-x", "IPP_CONNECTION_INFO", "-m", ENGINE_MODULE, profile),
            IPP_CONNECTION_INFO=files[1].read_text(encoding="utf-8"),
        )
        while True:
            self._step()

    def _start(self, name: str, *module: str, **variables: str) -> None:
        environment = {**environment_of_children(), **variables}
        with self._profile_directory.log(name).open("wb") as log:
            self._processes.start(name, [sys.executable, "-m", *module], environment, log, log)

    def _step(self) -> None:
        """Wait one poll interval; raise if the cluster must stop or a child has exited."""
        asked = bool(wait([] if self._owner is None else [self._pipe], _POLL_INTERVAL))
        with contextlib.suppress(EOFError, ConnectionError):
            if asked and self._pipe.recv() == "release":
                self._owner, asked = None, False
        if self._stopping or (self._owner is not None and (os.getppid() != self._owner or asked)):
            raise _StopRequested
        for name, child in self._processes.running.items():
            if child.poll() is not None:
                what = f"ended with exit code {child.returncode}"
                raise _ChildExited(self._log_message(str(name), what))

    def _send_status(self, **status: str) -> None:
        """Send a status message to the owner, which may have closed the pipe."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send(status)

    def _log_message(self, name: str, what: str) -> str:
        return f"{name}: {what}; the last that was said:\n{self._profile_directory.log_tail(name)}"

    def _close(self) -> None:
        """Terminate the engines, which the controller notices, and then the controller."""
        for child in reversed(self._processes.running.values()):  # the controller came first
            end_process(child, _SHUTDOWN_TIMEOUT)
        self._processes.kill_descendants()
        if self._private:
            shutil.rmtree(self._profile_directory.path, ignore_errors=True)


def _is_complete_json(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(file.read_text(encoding="utf-8")))
    return False


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        sys.exit(ClusterDaemon(connection).run())
