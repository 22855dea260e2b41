"""Cluster of ipyparallel engines that are MPI ranks, controlled from a notebook."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncddp.errors import ArgumentError, EnvironmentProblem, UsageError
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.notebook_cluster.cell_hooks import (
    fail_further_operations,
    operation_counts,
    resume,
)
from asyncddp.launch.notebook_cluster.cluster_spec import build_cluster_spec
from asyncddp.launch.notebook_cluster.profile_directory import ProfileDirectory, import_ipyparallel
from asyncddp.launch.notebook_cluster.start_and_stop import StartedCluster, start_cluster
from asyncddp.rank_list_text import list_ranks

_OUTPUT_TIMEOUT = 10.0  # seconds for output of the ranks to arrive at first
_OUTPUT_INTERVAL = 1.0  # seconds after which output is asked for again
_INTERRUPT_INTERVAL = 2.0  # seconds until an engine that goes on is interrupted again
_IDLE_TIMEOUT = 1.0  # seconds for the controller to know that a cell has ended
_EXIT_TIMEOUT = 2.0  # seconds for the whole cluster to end after an engine has
_OUT_OF_STEP = (
    "the ranks have lost step, for a cell failed or was interrupted on some of them before or in a "
    "verb; call bf.shutdown() and then bf.init() on all ranks"
)


class Cluster:
    """Cluster of ``n`` ipyparallel engines, one per MPI rank; ``%%px`` cells run on all of them.

    It is on this machine's loopback, with keys, unless there are hosts, and ends with this process.

    Args:
        n: How many ranks; None for as many as the hosts have slots.
        hosts: Other machines, as for ``asyncddp run -H``.
        hostfile: The same, in a file.
        network_interface: Through which interface the machines reach each other.
        timeout: Seconds for the engines to answer.

    Attributes:
        client: The ``ipyparallel.Client``.
        view: Its ``DirectView`` of all ranks in order; it waits for results.

    Raises:
        ArgumentError: An argument has a value that cannot be served.
        EnvironmentProblem: A package or MPI is missing, or the engines failed to start.

    Example::

        with asyncddp.notebook.Cluster(2) as cluster:
            pids = cluster.view.apply_sync(os.getpid)
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        hosts: str | None = None,
        hostfile: str | os.PathLike[str] | None = None,
        network_interface: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        import_ipyparallel()
        if n is not None and (not isinstance(n, int) or n < 1):
            raise ArgumentError(f"Cluster: argument n: expected at least 1 rank, got {n!r}")
        file = None if hostfile is None else Path(hostfile)
        options = RunOptions(
            num_proc=n, hosts=hosts, hostfile=file, network_interface=network_interface
        )
        spec = build_cluster_spec(options)
        started = time.monotonic()
        with contextlib.ExitStack() as undo, progress_line() as show:
            show(f"Starting {spec.ranks} ranks …")
            cluster_process = start_cluster(spec, timeout=timeout)
            undo.callback(cluster_process.stop)
            client = undo.enter_context(_client(cluster_process.profile_directory, timeout))

            def progress(count: int) -> None:
                seconds = time.monotonic() - started
                show(f"Starting {spec.ranks} ranks … {count} are there, after {seconds:.0f} s")

            cluster_process.wait_for_engines(client, timeout, progress)
            self._open(client, cluster_process.profile_directory, cluster_process)
            show(f"{spec.ranks} ranks are ready; cells that begin with %%px run on all of them.")
            undo.pop_all()

    @classmethod
    def connect(cls, profile: str = "asyncddp", *, timeout: float = 30.0) -> Cluster:
        """Connect to a cluster started by ``asyncddp notebook start`` or ``ibfrun start``.

        It keeps running after this object is stopped; ``asyncddp notebook stop`` ends it.

        Args:
            profile: Its IPython profile; that of ``ibfrun start`` is ``bluefog``.
            timeout: Seconds for it to answer.

        Raises:
            EnvironmentProblem: None runs under that profile, or it does not answer.
        """
        profile_directory = ProfileDirectory.for_profile(profile)
        record = profile_directory.running_cluster()
        if record is None:
            raise EnvironmentProblem(
                f"no cluster runs under profile {profile!r}: start one by 'asyncddp notebook start "
                f"-np 4 --profile {profile}'"
            )
        with contextlib.ExitStack() as undo:
            client = undo.enter_context(_client(profile_directory, timeout))
            until = time.monotonic() + timeout
            while len(client.ids) < record.ranks:
                if time.monotonic() > until:
                    raise EnvironmentProblem(
                        f"{len(client.ids)} of {record.ranks} engines answered within {timeout:g} s"
                    )
                time.sleep(0.1)
            self = cls.__new__(cls)
            self._open(client, profile_directory, None)
            undo.pop_all()
        return self

    def _open(
        self, client: Any, directory: ProfileDirectory, cluster_process: StartedCluster | None
    ) -> None:
        self.client, self.view = client, client[:]
        self.view.block = True
        self._profile_directory, self._cluster_process = directory, cluster_process
        self._process, self._stopped = os.getpid(), False
        atexit.register(self.stop)
        self._wait_for_output()
        self.activate()

    def _wait_for_output(self) -> None:
        """Wait until output of idle ranks arrives; ipyparallel waits forever for lost output."""
        until = time.monotonic() + _OUTPUT_TIMEOUT
        if self._busy():
            return
        while not self.view.execute("", block=False).wait_for_output(_OUTPUT_INTERVAL):
            if time.monotonic() > until:
                return  # somebody else's cell runs there

    def activate(self) -> None:
        """Register ``%%px`` for this cluster in IPython, if present, as ``Cluster()`` does."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None:
            from asyncddp.notebook.cluster_magics import ClusterCellMagics

            shell.register_magics(ClusterCellMagics(shell, self))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.view.targets)

    def __repr__(self) -> str:
        running = "connected" if self._cluster_process is None else "running"
        state = "stopped" if self._stopped else running
        return f"<Cluster of {self.size} ranks, {state}>"

    def check(self, *, wait: float = 0.0) -> None:
        """Raise if the cluster cannot run cells; wait up to ``wait`` seconds for news of its end.

        Raises:
            UsageError: It has been stopped.
            EnvironmentProblem: It has ended; says what was said last.
        """
        if self._stopped:
            raise UsageError("this cluster has been stopped: make another one, Cluster(n)")
        if self._cluster_process is not None:
            self._cluster_process.ready(wait)
        elif self._profile_directory.running_cluster() is None:
            raise EnvironmentProblem(
                "the cluster has ended; the last that its engines said:\n"
                f"{self._profile_directory.log_tail('engines')}"
            )

    def interrupt(self, timeout: float = 10.0) -> list[int]:
        """Interrupt running cells like Ctrl-C: they raise ``KeyboardInterrupt``.

        Whatever the ranks hold stays. Where some of them were in a verb that others have not
        called, further verbs say that ``shutdown()`` and ``init()`` are due.

        Args:
            timeout: Seconds to wait until all of them are free.

        Returns:
            The ranks that were busy.

        Raises:
            EnvironmentProblem: Some ranks went on regardless, as in C code; names them.
        """
        self.check()
        found = busy = self._busy()
        until = time.monotonic() + timeout
        again = 0.0
        while not busy and self.client.outstanding and time.monotonic() < until:
            time.sleep(0.02)  # the hub hears of this client's own cells later than the ranks
            found = busy = self._busy()
        while busy:
            now = time.monotonic()
            if now > until:
                raise EnvironmentProblem(
                    f"{list_ranks(busy)} did not stop within {timeout:g} s, as code outside "
                    "Python does not, nor bf.init() where other ranks have yet to call it: call it "
                    "there, or end all ranks by cluster.stop()"
                )
            if now > again:
                self.client.send_signal("SIGINT", targets=busy, block=True)
                again = now + _INTERRUPT_INTERVAL
            time.sleep(0.02)
            busy = self._busy()
        if found:
            self.after_errors()
        return found

    def _busy(self) -> list[int]:
        """Ranks that are running a cell or have one queued, from any client.

        The hub hears of the end of this client's own cells later than the client itself.
        """
        status = self.client.queue_status(targets=self.view.targets, verbose=True)
        ended = set(self.client.history) - self.client.outstanding
        return [rank for rank in self.view.targets if not ended.issuperset(status[rank]["queue"])]

    def after_errors(self, *, died: bool = False) -> None:
        """Let the ranks continue after errors, or fail if they are out of step.

        Raises:
            EnvironmentProblem: The cluster has ended, as it does where an engine has ``died``.
        """
        if died:
            self.check(wait=_EXIT_TIMEOUT)
        until = time.monotonic() + _IDLE_TIMEOUT
        while self._busy():
            if time.monotonic() > until:
                return  # another cell runs there
            time.sleep(0.02)
        counts = [one for one in self.view.apply_sync(operation_counts) if one is not None]
        if all(one == counts[0] for one in counts):
            self.view.apply_sync(resume)
        else:
            self.view.apply_sync(fail_further_operations, _OUT_OF_STEP)

    def stop(self) -> None:
        """Stop the cluster and wait until all its processes have ended; harmless when called twice.

        A cluster from :meth:`connect` is only disconnected.
        """
        if self._stopped or os.getpid() != self._process:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        self.client.close(linger=0)
        if self._cluster_process is not None:
            self._cluster_process.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _client(profile_directory: ProfileDirectory, timeout: float) -> Any:
    return import_ipyparallel().Client(str(profile_directory.client_file), timeout=timeout)


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the displayed text; the last text remains.

    It shows nothing if standard error is not a terminal, as in scripts.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is not None:
        yield _in_notebook()
    elif sys.stderr.isatty():
        from rich.console import Console

        console, last = Console(stderr=True), ""
        with console.status("") as status:

            def show(text: str) -> None:
                nonlocal last
                last = text
                status.update(text)

            yield show
        console.print(last, highlight=False)
    else:
        yield lambda text: None


def _in_notebook() -> Callable[[str], None]:
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        if text != shown:
            (handle.update if shown else handle.display)({"text/plain": text}, raw=True)
        shown = text

    return show
