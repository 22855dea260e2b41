"""Runs the launcher process: relays output and signals, kills processes left behind."""

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

from asyncddp.launch.launcher_message_filter import LauncherMessageFilter
from asyncddp.launch.process_cleanup import kill_processes, parent_death_setter
from asyncddp.launch.rank_tracker import RankTracker

REPORT_DIR = "ASYNCDDP_REPORT_DIR"  # which also tells the processes of one run from others
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ESCALATION_INTERVAL = 5.0  # seconds between two ever stronger signals to the launcher
_PAUSE = 0.2  # seconds after which a writer's unfinished line is shown
_DRAIN = 0.5  # seconds to read what is left after the launcher has ended
_POLL_INTERVAL = 0.2  # seconds between two looks at the report directory
_GRACE_PERIOD = 3.0  # seconds that a launcher has to end after a rank has reported its failure
_LOSS_GRACE_PERIOD = 15.0  # seconds that it has after this machine's ranks were lost without one


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run: the launcher's exit code, and what became of this machine's ranks."""

    code: int  # negative for the signal that killed the launcher
    signal: int | None  # the first that this process received during the run
    timed_out: bool
    lost: tuple[int, ...] = ()  # whose process ended irregularly, in order
    ended: tuple[int, ...] = ()  # which came to the end of their scripts
    waiting_in_init: tuple[int, ...] = ()  # killed there, where they waited for one that had ended


@dataclass
class _LauncherOutputPipe:
    """A pipe from the launcher's stdout or stderr through a filter to a file descriptor."""

    source: IO[bytes]
    target: int
    output_filter: LauncherMessageFilter
    quiet_since: float = field(default_factory=time.monotonic)

    def forward(self) -> bool:
        """Forward the available output; return False at the end of the stream."""
        data = os.read(self.source.fileno(), 1 << 16)
        self.quiet_since = time.monotonic()
        _write(self.target, self.output_filter.feed(data) if data else self.output_filter.flush())
        return bool(data)

    def flush_after_pause(self) -> None:
        if self.output_filter.has_pending and time.monotonic() - self.quiet_since >= _PAUSE:
            _write(self.target, self.output_filter.flush())
        _write(self.target, self.output_filter.due_warnings())


def _write(target: int, data: bytes) -> None:
    """Write all bytes; a closed reader, as in ``| head``, is no error."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(target, data) :]


class _LauncherTerminator:
    """Ends the launcher by ever stronger signals, at last by SIGKILL to the whole run."""

    def __init__(self, child: subprocess.Popen[bytes], marker: str) -> None:
        self._child, self._marker = child, marker
        self._stronger: list[signal.Signals] = []
        self.deadline = math.inf
        self.received: int | None = None

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Forward the first signal to the launcher; kill everything at the second."""
        if self.received is None:
            self.received = number
            self.begin(number)
        else:
            self._send(signal.SIGKILL)

    def begin(self, number: int) -> None:
        self._stronger = [signal.SIGTERM, signal.SIGKILL]
        self._send(number)

    def escalate(self) -> None:
        self.deadline = math.inf
        if self._stronger:
            self._send(self._stronger.pop(0))

    def _send(self, number: int) -> None:
        self.deadline = time.monotonic() + _ESCALATION_INTERVAL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)
        if number == signal.SIGKILL:
            kill_processes(self._marker)


@contextlib.contextmanager
def termination_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP in the block, unless they are ignored, as under nohup."""
    wanted = [n for n in _FORWARDED_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _wakeup_socket() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable after each signal, also when a child ends."""
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
    *,
    report_directory: Path,
    output_filters: tuple[LauncherMessageFilter | None, LauncherMessageFilter],
    timeout: float | None = None,
    started: Callable[[int], None] = lambda process: None,
) -> RunOutcome:
    """Run a launcher until it ends, and kill what is left of its processes.

    It runs in a session of its own, so that Ctrl-C reaches this process alone, which forwards it:
    ranks are then ended in the launcher's orderly way, and a second Ctrl-C kills them all. The
    filters are of standard output, which is not piped where that is None, and of standard error.
    ``started`` is called with the launcher's process id.
    """
    stdout, stderr = output_filters
    marker = f"{REPORT_DIR}={report_directory}"
    with subprocess.Popen(
        list(arguments),
        env={**environment, REPORT_DIR: str(report_directory)},
        stdin=subprocess.DEVNULL,
        stdout=None if stdout is None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=parent_death_setter(),  # safe: no thread has been started
    ) as child:
        started(child.pid)
        terminator = _LauncherTerminator(child, marker)
        pipes = [_LauncherOutputPipe(child.stderr, 2, stderr)] if child.stderr is not None else []
        if child.stdout is not None and stdout is not None:
            pipes.append(_LauncherOutputPipe(child.stdout, 1, stdout))
        ends = math.inf if timeout is None else time.monotonic() + timeout
        with (
            termination_handler(terminator.on_signal),
            _wakeup_socket() as wakeups,
            contextlib.closing(_SupervisorLoop(pipes, wakeups, report_directory)) as loop,
        ):
            loop.run(child, terminator, ends)
        kill_processes(marker)
    lost, ended = tuple(loop.tracker.lost), loop.tracker.ended()
    ending = child.returncode, terminator.received, loop.timed_out
    return RunOutcome(*ending, lost, ended, loop.waiting_in_init)


class _SupervisorLoop:
    """Event loop of the supervisor: handles launcher output, signals, rank starts and ends."""

    def __init__(
        self, pipes: list[_LauncherOutputPipe], wakeups: socket.socket, report_directory: Path
    ) -> None:
        self.tracker = RankTracker(report_directory)
        self.timed_out = False
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

    def run(
        self, child: subprocess.Popen[bytes], terminator: _LauncherTerminator, ends: float
    ) -> None:
        reported = lost = math.inf
        while child.poll() is None:
            for rank, descriptor in self.tracker.new_processes().items():
                on_exit = functools.partial(self.tracker.on_process_exit, rank)
                self._selector.register(descriptor, selectors.EVENT_READ, on_exit)
            self._step(min(ends, terminator.deadline, time.monotonic() + _POLL_INTERVAL))
            now = time.monotonic()
            if now >= ends:
                ends, self.timed_out = math.inf, True
                terminator.begin(signal.SIGTERM)
            if now >= terminator.deadline:
                terminator.escalate()
            waiting = self.tracker.waiting_in_init()
            reported = min(reported, now) if waiting or self.tracker.has_reports() else math.inf
            lost = min(lost, now) if self.tracker.is_lost_for_good() else math.inf
            over = now >= min(reported + _GRACE_PERIOD, lost + _LOSS_GRACE_PERIOD)
            if over and terminator.deadline == math.inf:
                self.waiting_in_init = waiting
                # Hydra waits for the others where MPI was not started; PRRTE sometimes waits for
                # ever where MPI has aborted on one host while a rank was killed on another
                terminator.begin(signal.SIGTERM)
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
            _write(pipe.target, left)
