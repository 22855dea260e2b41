"""Start and stop of an ipyparallel cluster for notebooks, with a wait for its engines."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.notebook_cluster.cluster_spec import ClusterSpec
from asyncddp.launch.notebook_cluster.profile_directory import (
    ClusterRecord,
    ProfileDirectory,
    import_ipyparallel,
)
from asyncddp.launch.rank_processes import end_process, kill_processes

_DAEMON = "asyncddp.launch.notebook_cluster.daemon"
_STOP_TIMEOUT = 20.0  # seconds for a cluster to end when asked
_POLL_INTERVAL = 0.1  # seconds between two checks of the daemon


class StartedCluster:
    """ipyparallel cluster started by this process, controlled through its daemon process."""

    def __init__(
        self, profile_directory: ProfileDirectory, spec: ClusterSpec, *, private: bool
    ) -> None:
        self.profile_directory, self.spec, self._private = profile_directory, spec, private
        self._status: dict[str, str] = {}
        self._pipe, end = Pipe()
        self._pipe.send((profile_directory, spec, os.getpid(), private))
        with end, profile_directory.log("daemon").open("wb") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", _DAEMON, str(end.fileno())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=[end.fileno()],
            )  # fmt: skip

    def ready(self, wait: float) -> bool:
        """Return whether the controller is ready within a timeout; raise if startup has failed."""
        self._receive(wait)
        if "busy" in self._status:
            raise _already_running(self.profile_directory)
        if "ended" in self._status:
            raise EnvironmentProblem(f"the cluster has ended. {self._status['ended']}")
        if self._daemon.poll() is not None:
            said = self.profile_directory.log_tail("daemon")
            raise EnvironmentProblem(f"the cluster has ended; its daemon said:\n{said}")
        return "ready" in self._status

    def wait_for_engines(
        self, client: Any, timeout: float, progress: Callable[[int], None] = lambda count: None
    ) -> None:
        """Wait until every engine responds to an ``ipyparallel.Client``; report progress."""
        until = time.monotonic() + timeout
        while (count := len(client.ids)) < self.spec.ranks:
            progress(count)
            self.ready(_POLL_INTERVAL)
            if time.monotonic() > until:
                raise EnvironmentProblem(
                    f"{count} of {self.spec.ranks} engines answered within {timeout:g} s; the "
                    f"launcher said:\n{self.profile_directory.log_tail('engines')}"
                )
        progress(count)

    def _receive(self, wait: float) -> None:
        try:
            while not self._pipe.closed and self._pipe.poll(wait):
                self._status.update(self._pipe.recv())
                wait = 0.0
        except (EOFError, ConnectionError):
            self._pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(_POLL_INTERVAL)

    def release(self) -> None:
        """Detach the cluster, so that it outlives this process."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send("release")
        self._pipe.close()

    def wait(self) -> None:
        """Wait until the cluster has stopped."""
        self._daemon.wait()

    def stop(self) -> None:
        """Stop the cluster and wait until all processes have ended; harmless when called twice."""
        if not end_process(self._daemon, _STOP_TIMEOUT):
            kill_processes(self.profile_directory.environment_marker)
        self._pipe.close()
        if self._private:
            shutil.rmtree(self.profile_directory.path, ignore_errors=True)


def _already_running(profile_directory: ProfileDirectory) -> EnvironmentProblem:
    name = profile_directory.path.name.removeprefix("profile_")
    return EnvironmentProblem(
        f"a cluster runs already under profile {name!r}: "
        f"{profile_directory.running_cluster() or 'it just began'}. "
        f"End it first, by 'asyncddp notebook stop --profile {name}', or give another --profile"
    )


def start_cluster(
    spec: ClusterSpec, profile_directory: ProfileDirectory | None = None, *, timeout: float = 120.0
) -> StartedCluster:
    """Start a cluster, which stops with this process unless it is released.

    The controller is ready then; the engines may still be starting: see
    :meth:`StartedCluster.wait_for_engines`. Without a profile directory a temporary one is used.
    """
    if profile_directory is not None and profile_directory.running_cluster() is not None:
        raise _already_running(profile_directory)
    import_ipyparallel()  # before anything is started
    directory = profile_directory
    if directory is None:
        directory = ProfileDirectory(Path(tempfile.mkdtemp(prefix="asyncddp-cluster-"))).create()
    with contextlib.ExitStack() as undo:
        cluster_process = StartedCluster(directory, spec, private=profile_directory is None)
        undo.callback(cluster_process.stop)
        until = time.monotonic() + timeout
        while not cluster_process.ready(_POLL_INTERVAL):
            if time.monotonic() > until:
                raise EnvironmentProblem(
                    f"the controller was not ready within {timeout:g} s; it said:\n"
                    f"{directory.log_tail('controller')}"
                )
        undo.pop_all()
    return cluster_process


def stop_cluster(profile_directory: ProfileDirectory) -> ClusterRecord | None:
    """Stop a profile's cluster, if one runs, and wait until its processes on this machine end."""
    record = profile_directory.running_cluster()
    if record is None:
        kill_processes(profile_directory.environment_marker)  # of a killed daemon
        return None
    if record.host != socket.gethostname():
        raise EnvironmentProblem(f"the cluster runs on {record.host}: stop it there")
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_TIMEOUT
    while profile_directory.running_cluster() is not None:
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
            kill_processes(profile_directory.environment_marker)
            break
        time.sleep(_POLL_INTERVAL)
    return record
