"""Processes of a run and their start, signals, output and termination, for all launchers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

FORWARDED_SIGNALS = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGALRM}
)
"""Signals that are passed on to the ranks, as mpirun does; they end no run."""
TERMINATION_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1
ESCALATION_INTERVAL = 5.0  # seconds between two ever stronger signals


@contextlib.contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], None],
    numbers: Iterable[signal.Signals] = TERMINATION_SIGNALS,
) -> Iterator[None]:
    """Handle signals in the ``with`` block, except ignored ones, such as SIGHUP under nohup."""
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def delivered(number: int) -> int:
    """Return the signal to send to ranks in place of a forwarded signal.

    It is SIGSTOP for SIGTSTP, which has no effect on processes in a session of their own.
    """
    return signal.SIGSTOP if number == signal.SIGTSTP else number


def write_all(target: int, data: bytes) -> None:
    """Write all bytes; a closed pipe (``| head``) or a full disk does not end the run."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except OSError as problem:
            if not isinstance(problem, BrokenPipeError):
                _warn_of_loss(target, problem.strerror)
            return


@functools.cache
def _warn_of_loss(target: int, why: str) -> None:
    """Warn once on standard error that output is lost."""
    words = f"asyncddp run: output of ranks is lost: {why} (descriptor {target})\n"
    with contextlib.suppress(OSError):
        os.write(2, words.encode())


def kill_processes(marker: str) -> None:
    """Kill all processes with ``NAME=value`` in their environment, including new children."""
    for _ in range(3):
        found = False
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (directory / "environ").read_bytes().split(b"\0")
                if marker.encode() in variables and int(directory.name) != os.getpid():
                    found = True
                    os.kill(int(directory.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def end_process(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Send SIGTERM to a process, and SIGKILL after a timeout; return False if it was killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
    return True


def parent_death_setter(number: int = signal.SIGTERM) -> Callable[[], object]:
    """Return a function that makes a process receive a signal when its parent dies."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(number))


class RankProcesses:
    """Group of processes signalled and terminated together, with escalating signals.

    Args:
        abort_signal: Makes them end soon.
        marker: ``NAME=value``, set in their environment, by which all that they start is found.
        sessions: Start each in a session of its own; signals reach its whole process group.
        bound: Send them the abort signal when this process dies; it must have one thread alone.
    """

    def __init__(
        self,
        abort_signal: int = signal.SIGTERM,
        marker: str = "",
        *,
        sessions: bool = True,
        bound: bool = True,
    ) -> None:
        self._abort_signal, self._marker = abort_signal, marker
        self._sessions, self._bound = sessions, bound
        self.running: dict[object, subprocess.Popen[bytes]] = {}
        self._stronger: list[int] = []
        self.deadline = math.inf
        """Time of the next, stronger signal."""

    def start(
        self,
        name: object,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process, by default with empty standard input."""
        variable, _, value = self._marker.partition("=")
        process = self.running[name] = subprocess.Popen(
            list(command),
            env={**environment, variable: value} if variable else dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=self._sessions,
            preexec_fn=parent_death_setter(self._abort_signal) if self._bound else None,
        )
        return process

    def send(self, number: int) -> None:
        """Send a signal to all the processes; SIGKILL also goes to all their descendants."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                if self._sessions:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
        if number == signal.SIGKILL:
            self.kill_descendants()

    def kill_descendants(self) -> None:
        """Kill all processes that carry the marker, including orphans."""
        if self._marker:
            kill_processes(self._marker)

    def end_within(self, seconds: float) -> None:
        """Give the processes some seconds to end by themselves, before signals escalate."""
        self._stronger = [self._abort_signal, signal.SIGKILL]
        self.deadline = time.monotonic() + seconds

    def escalate_if_due(self) -> bool:
        """Send the next, stronger signal if it is due; return whether it was."""
        if time.monotonic() < self.deadline:
            return False
        self.send(self._stronger.pop(0))
        self.deadline = time.monotonic() + ESCALATION_INTERVAL if self._stronger else math.inf
        return True
