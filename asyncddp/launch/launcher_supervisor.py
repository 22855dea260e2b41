"""Supervisor of the launcher process: relays output and signals, kills processes left behind."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launcher_message_filter import LauncherMessageFilter
from asyncddp.launch.launchers import Launcher
from asyncddp.launch.rank_processes import (
    ESCALATION_INTERVAL,
    FORWARDED_SIGNALS,
    TERMINATION_SIGNALS,
    RankProcesses,
    delivered,
    signal_handler,
    write_all,
)
from asyncddp.launch.rank_tracker import RankTracker

REPORT_DIR = "ASYNCDDP_REPORT_DIR"  # which also tells the processes of one run from others
_PAUSE = 0.2  # seconds after which a writer's unfinished line is shown
_DRAIN = 0.5  # seconds to read what is left after the launcher has ended
_POLL_INTERVAL = 0.2  # seconds between two looks at the report directory
_GRACE_PERIOD = 3.0  # seconds that a launcher has to end after a rank has reported its failure
_LOSS_GRACE_PERIOD = 15.0  # seconds that it has after this machine's ranks were lost without one


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run: the launcher's exit code, and the fate of this machine's ranks."""

    code: int  # negative for the signal that killed the launcher
    signal: int | None  # the first that this process received to end the run
    timed_out: bool
    killed: bool = False  # ranks had not ended when the grace period was over
    lost: tuple[int, ...] = ()  # whose process ended irregularly, in order
    ended: tuple[int, ...] = ()  # which came to the end of their scripts
    waiting_in_init: tuple[int, ...] = ()  # killed there, where they waited for one that had ended


@dataclass
class _LauncherOutputPipe:
    """Pipe from the launcher's stdout or stderr through a filter to a file descriptor."""

    source: IO[bytes]
    target: int
    output_filter: LauncherMessageFilter
    quiet_since: float = field(default_factory=time.monotonic)

    def forward(self) -> bool:
        """Forward the available output; return False at the end of the stream."""
        data = os.read(self.source.fileno(), 1 << 16)
        self.quiet_since = time.monotonic()
        write_all(
            self.target, self.output_filter.feed(data) if data else self.output_filter.flush()
        )
        return bool(data)

    def flush_after_pause(self) -> None:
        if self.output_filter.has_pending and time.monotonic() - self.quiet_since >= _PAUSE:
            write_all(self.target, self.output_filter.flush())
        write_all(self.target, self.output_filter.due_warnings())


class _Run(RankProcesses):
    """Launcher process and its ranks: forwards signals, and terminates remaining processes."""

    def __init__(
        self, launcher: Launcher, tracker: RankTracker, grace_period: float, marker: str
    ) -> None:
        super().__init__(launcher.abort_signal, marker)
        self._launcher, self._tracker, self._grace_period = launcher, tracker, grace_period
        self.received: int | None = None
        self.aborted = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Forward a signal; a first termination signal ends the run, a second one kills it."""
        if number in FORWARDED_SIGNALS:
            self._forward(number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
        elif self.received is None:
            self.received = number
            self.terminate(number)
        elif not (number == self.received == signal.SIGTERM):  # which batch systems may repeat
            self.send(signal.SIGKILL)

    def terminate(self, number: int) -> None:
        """End the run by a signal; after SIGTERM, ranks have the grace period to save."""
        if number == signal.SIGTERM and self._forward(number):
            self.end_within(self._grace_period)
        else:
            self.abort(number)

    def abort(self, number: int | None = None) -> None:
        """Make the launcher end all ranks at once."""
        self.aborted = True
        self.send(self._launcher.abort_signal if number is None else number)
        self.end_within(ESCALATION_INTERVAL)

    def _forward(self, number: int) -> bool:
        """Forward a signal to the ranks; return False if none could be reached.

        A launcher that would not pass it on is left out: ranks of this machine get it directly.
        """
        if number not in self._launcher.forwarded_signals:
            return self._tracker.send(delivered(number))
        for launcher in self.running.values():  # not its group, where helpers would die of it
            with contextlib.suppress(ProcessLookupError):
                launcher.send_signal(number)
        return True


@contextlib.contextmanager
def _wakeup_socket() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable after each signal, including a child's end."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGCHLD, before)


def supervise(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    launcher: Launcher,
    report_directory: Path,
    output_filters: tuple[LauncherMessageFilter | None, LauncherMessageFilter],
    options: RunOptions,
    started: Callable[[int], None] = lambda process: None,
) -> RunOutcome:
    """Run a launcher until it ends, and kill the processes that it leaves behind.

    It runs in a session of its own, so that Ctrl-C reaches this process alone, which forwards it:
    ranks are then ended in the launcher's orderly way, and a second Ctrl-C kills them all. The
    filters are of standard output, which is not piped where that is None, and of standard error.
    After SIGTERM, or the timeout, ranks have the grace period to end by themselves.
    ``started`` is called with the launcher's process id.
    """
    stdout, stderr = output_filters
    tracker = RankTracker(report_directory, elastic=options.elastic)
    run = _Run(launcher, tracker, options.grace_period, f"{REPORT_DIR}={report_directory}")
    piped = None if stdout is None else subprocess.PIPE
    with run.start("launcher", arguments, environment, piped, subprocess.PIPE) as child:
        started(child.pid)
        pipes = [_LauncherOutputPipe(child.stderr, 2, stderr)] if child.stderr is not None else []
        if child.stdout is not None and stdout is not None:
            pipes.append(_LauncherOutputPipe(child.stdout, 1, stdout))
        ends = math.inf if options.timeout is None else time.monotonic() + options.timeout
        with (
            signal_handler(run.on_signal, TERMINATION_SIGNALS | FORWARDED_SIGNALS),
            _wakeup_socket() as wakeups,
            contextlib.closing(_SupervisorLoop(pipes, wakeups, tracker)) as loop,
        ):
            loop.run(child, run, ends)
        run.kill_descendants()
    ending = child.returncode, run.received, loop.timed_out, loop.killed
    return RunOutcome(*ending, tuple(tracker.lost), tracker.ended(), loop.waiting_in_init)


class _SupervisorLoop:
    """Event loop of the supervisor: handles launcher output, signals, rank starts and ends."""

    def __init__(
        self, pipes: list[_LauncherOutputPipe], wakeups: socket.socket, tracker: RankTracker
    ) -> None:
        self.tracker = tracker
        self.timed_out = self.killed = False
        self.waiting_in_init: tuple[int, ...] = ()
        self._pipes, self._wakeups = pipes, wakeups
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeups, selectors.EVENT_READ, self._drain_wakeups)
        for pipe in pipes:
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe.forward)

    def close(self) -> None:
        self._selector.close()
        self.tracker.close()

    def _drain_wakeups(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wakeups.recv(4096)
        return True

    def run(self, child: subprocess.Popen[bytes], run: _Run, ends: float) -> None:
        reported = lost = math.inf
        while child.poll() is None:
            for rank, descriptor in self.tracker.new_processes().items():
                on_exit = functools.partial(self.tracker.on_process_exit, rank)
                self._selector.register(descriptor, selectors.EVENT_READ, on_exit)
            self._step(min(ends, run.deadline, time.monotonic() + _POLL_INTERVAL))
            now = time.monotonic()
            if now >= ends:
                ends, self.timed_out = math.inf, True
                run.terminate(signal.SIGTERM)
            self.killed |= run.escalate_if_due() and not run.aborted
            waiting = self.tracker.waiting_in_init()
            reported = (
                min(reported, now) if waiting or self.tracker.has_ending_report() else math.inf
            )
            lost = min(lost, now) if self.tracker.is_lost_for_good() else math.inf
            over = now >= min(reported + _GRACE_PERIOD, lost + _LOSS_GRACE_PERIOD)
            if over and not run.aborted:
                self.waiting_in_init = waiting
                # Hydra waits for the others where MPI was not started; PRRTE sometimes waits for
                # ever where MPI has aborted on one host while a rank was killed on another
                run.abort()
        self._finish()

    def _step(self, until: float) -> None:
        if any(pipe.output_filter.has_pending for pipe in self._pipes):
            until = min(until, time.monotonic() + _PAUSE)
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if not key.data():
                self._selector.unregister(key.fileobj)
        for pipe in self._pipes:
            pipe.flush_after_pause()

    def _finish(self) -> None:
        last = time.monotonic() + _DRAIN
        sources = {pipe.source for pipe in self._pipes}
        registered = self._selector.get_map().values()  # a live view
        while time.monotonic() < last and any(key.fileobj in sources for key in registered):
            self._step(last)
        for pipe in self._pipes:
            left = pipe.output_filter.flush() + pipe.output_filter.due_warnings(at_end=True)
            write_all(pipe.target, left)
