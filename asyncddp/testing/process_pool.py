"""Pool of rank processes under a launcher, which run test cases one after the other.

Starting ``mpirun`` and torch takes seconds, a case milliseconds. A pool that hangs or dies is ended
with all its processes and started again by the next case.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import psutil

import asyncddp
from asyncddp.environments.rank_process_marker import environment_of_children
from asyncddp.launch.job_options import Job
from asyncddp.launch.launcher_discovery import LOCAL_NAME, find_launcher
from asyncddp.launch.rank_processes import RankProcesses, end_process
from asyncddp.testing.outcome import Outcome
from asyncddp.testing.rank_function_call import RankFunctionCall
from asyncddp.transport import TRANSPORTS

LAUNCHER_PIDS: set[int] = set()
"""Process ids of the pools' running launchers."""

_WORKER = "asyncddp.testing.pool_worker"
_START = 180.0  # seconds for mpirun and the import of torch, on a busy machine too
_GRACE = 10.0  # seconds in which the ranks beside a dead one may still answer


class ProcessPoolError(AssertionError):
    """Error of a pool of rank processes that hung or died; the message shows their output."""


@dataclass(frozen=True)
class _RankProcess:
    """Process of one rank in a pool: its process id and the connection to it."""

    rank: int
    pid: int
    connection: Connection[Any, Any]


class ProcessPool:
    """Pool of rank processes under one launcher, reused across test cases.

    The launcher is that of MPI, or the library's own for a transport that MPI does not start.
    """

    def __init__(self, ranks: int, transport: str) -> None:
        self.ranks, self._transport = ranks, transport
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[_RankProcess] = []
        self._log: IO[bytes] | None = None

    @staticmethod
    def python() -> Sequence[str]:
        """Return the command that starts Python on a rank."""
        return (sys.executable,)

    def run_case(self, case: RankFunctionCall, limit: float = 120.0) -> list[Outcome]:
        """Run a case on all ranks; raise if one dies or takes longer than ``limit`` seconds."""
        if self._process is None:
            self._start()
        for member in self._members:
            member.connection.send_bytes(pickle.dumps(case))
        outcomes, dead, mute = self._gather(limit)
        if dead or mute:
            raise ProcessPoolError(self._describe_failure(case.function, outcomes, dead, mute))
        return [outcomes[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """Terminate the rank processes."""
        if self._process is None:
            return
        for member in self._members:
            with contextlib.suppress(OSError):
                member.connection.send_bytes(pickle.dumps(None))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._end()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder, "pool"))
            listener.bind(address)
            listener.listen(self.ranks)
            listener.settimeout(0.2)
            program = (*self.python(), "-m", _WORKER, address, self._transport)
            by_mpi = TRANSPORTS[self._transport].started_by_mpi
            command, variables = launch(
                self.ranks, *program, launcher=None if by_mpi else LOCAL_NAME
            )
            self._process = RankProcesses(bound=False).start(
                None, command, variables, self._log, self._log
            )
            LAUNCHER_PIDS.add(self._process.pid)
            self._accept_ranks(listener, self._process)

    def _accept_ranks(self, listener: socket.socket, launcher: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START
        while len(self._members) < self.ranks:
            try:
                end, _ = listener.accept()
            except TimeoutError:
                if launcher.poll() is None and time.monotonic() <= deadline:
                    continue
                problem = self._end(f"a pool of {self.ranks} did not start")
                raise ProcessPoolError(problem) from None
            end.setblocking(True)
            connection: Connection[Any, Any] = Connection(end.detach())
            rank, pid = pickle.loads(connection.recv_bytes())
            self._members.append(_RankProcess(rank, pid, connection))
        self._members.sort(key=lambda member: member.rank)

    def _gather(self, limit: float) -> tuple[dict[int, Outcome], set[int], set[int]]:
        """Collect the ranks' outcomes, the ranks that died, and the ranks that timed out."""
        waiting = list(self._members)
        outcomes: dict[int, Outcome] = {}
        dead: set[int] = set()
        deadline = time.monotonic() + limit
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait([member.connection for member in waiting], timeout=left)
            for member in [member for member in waiting if member.connection in ready]:
                waiting.remove(member)
                try:
                    outcomes[member.rank] = pickle.loads(member.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead.add(member.rank)
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes, dead, {member.rank for member in waiting}

    def _describe_failure(
        self, function: str, outcomes: dict[int, Outcome], dead: set[int], mute: set[int]
    ) -> str:
        """Terminate the pool and describe the failure."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # its main thread's stack, then all stacks
            for member in self._members:
                if member.rank in mute and psutil.pid_exists(member.pid):
                    psutil.Process(member.pid).send_signal(number)
            time.sleep(0.3 if mute else 0.0)
        lines = [f"{function} on {self.ranks} ranks:"]
        lines += [f"rank {rank} died" for rank in sorted(dead)]
        lines += [f"rank {rank} hung" for rank in sorted(mute)]
        for rank, outcome in sorted(outcomes.items()):
            ending = f"failed\n{outcome.trace}" if outcome.error else "ended"
            lines.append(f"rank {rank} {ending}")
        return self._end("\n".join(lines))

    def _end(self, why: str = "") -> str:
        """Terminate all processes; return ``why`` followed by their output."""
        if self._process is not None:
            end_session(self._process)
            LAUNCHER_PIDS.discard(self._process.pid)
            self._process = None
        for member in self._members:
            member.connection.close()
        self._members = []
        if self._log is None:
            return why
        with self._log as log:
            log.seek(0)
            printed = log.read().decode("utf-8", "replace")
        self._log = None
        return f"{why}\n--- printed by the pool ---\n{printed[-8000:]}"


def launch(
    ranks: int, *program: str, launcher: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Build the command and the environment that start a program on ranks of this machine.

    There may be more ranks than cores. This process's ``ASYNCDDP_…`` variables are left out.
    """
    own = environment_of_children()
    kept = {key: value for key, value in own.items() if not key.startswith("ASYNCDDP_")}
    found = find_launcher(launcher, kept)
    job = Job(ranks, program, oversubscribe=True, environment=kept, root=os.geteuid() == 0)
    command = found.launcher.build_command(found.executable, job)
    home = str(Path(asyncddp.__file__).parents[1])  # also where it is not installed
    path = os.pathsep.join([home, *filter(None, [kept.get("PYTHONPATH")])])
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return list(command.arguments), {**kept, **command.environment, **added}


def session_processes(session: int) -> list[psutil.Process]:
    """List the live processes of a session, in all of its process groups."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_session(process: subprocess.Popen[bytes], grace: float = 3.0) -> None:
    """Terminate a process started in a new session, and all processes of that session."""
    end_process(process, grace)  # SIGTERM lets a launcher take its ranks along
    for process_left in session_processes(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process_left.kill()
