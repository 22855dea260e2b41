"""Runs the launcher: passes output and signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from asyncddp.launch.sieve import Sieve

__all__ = ["Ending", "processes_of", "supervise"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 5.0  # seconds between one way of asking the launcher to end and the next
_PAUSE = 0.2  # seconds after which a writer's unfinished line is shown
_DRAIN = 0.5  # seconds to read what is left after the launcher has ended
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: The launcher's exit code; negative for the signal that killed it.
        signal: The first signal that this process was sent meanwhile.
        timed_out: Whether the run was ended because its time was up.
    """

    code: int
    signal: int | None
    timed_out: bool


@dataclass
class _Pipe:
    """One of the launcher's streams, where it goes, and what is taken out on the way."""

    source: IO[bytes]
    target: int
    sieve: Sieve
    quiet_since: float = field(default_factory=time.monotonic)

    def pump(self) -> bool:
        """Pass on what has come; False at the end of the stream."""
        data = os.read(self.source.fileno(), 1 << 16)
        self.quiet_since = time.monotonic()
        _write(self.target, self.sieve.feed(data) if data else self.sieve.release())
        return bool(data)

    def release_after_pause(self) -> None:
        if self.sieve.holds and time.monotonic() - self.quiet_since >= _PAUSE:
            _write(self.target, self.sieve.release())


def _write(target: int, data: bytes) -> None:
    """Write all of it; a reader that has gone away, as in ``| head``, is no error of ours."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(target, data) :]


class _Stopper:
    """Asks the launcher to end, ever more firmly: SIGINT or SIGTERM, SIGTERM, SIGKILL to all."""

    def __init__(self, child: subprocess.Popen[bytes], marker: str) -> None:
        self._child, self._marker = child, marker
        self._next: list[Callable[[], None]] = []
        self.deadline = float("inf")
        self.received: int | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on; end everything at the second."""
        del frame
        if self.received is not None:
            self._kill()
            return
        self.received = number
        self.begin(number)

    def begin(self, number: int) -> None:
        self._next = [lambda: self._send(signal.SIGTERM), self._kill]
        self._send(number)

    def escalate(self) -> None:
        if self._next:
            self._next.pop(0)()

    def _send(self, number: int) -> None:
        self.deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        kill_processes_of(self._marker)


def processes_of(marker: str) -> list[int]:
    """Process ids on this machine that have a variable in their environment; Linux only.

    Args:
        marker: ``NAME=value``, unique to a run, so that its processes are found wherever they are
            in the tree of processes.
    """
    wanted, found = marker.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_processes_of(marker: str) -> None:
    """Kill every process of a run, and those that they start meanwhile."""
    for _ in range(3):
        left = processes_of(marker)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def _die_with_parent() -> Callable[[], None] | None:
    """What makes the launcher end when this process is killed; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[socket.socket]:
    """Handle the signals meanwhile; gives a socket that is readable after each of them."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wanted = [n for n in _PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, handler) for number in wanted}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes us up
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, old in before.items():
            signal.signal(number, old)
        reader.close()
        writer.close()


def supervise(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    marker: str,
    sieves: tuple[Sieve | None, Sieve],
    timeout: float | None = None,
) -> Ending:
    """Run a launcher to its end.

    It runs in a session of its own, so that Ctrl-C reaches this process alone, which passes it on:
    ranks are then ended in the launcher's orderly way, and a second Ctrl-C kills them all.

    Args:
        arguments: The launcher's command line.
        environment: Its whole environment, with the marker in it.
        marker: ``NAME=value`` by which the run's processes are known.
        sieves: What to take out of standard output, which is passed on as it is where that is
            None, and of standard error.
        timeout: Seconds after which the run is ended.
    """
    stdout, stderr = sieves
    with subprocess.Popen(
        list(arguments),
        env=dict(environment),
        stdin=subprocess.DEVNULL if os.isatty(0) else None,  # a session of its own has no terminal
        stdout=None if stdout is None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # safe: no thread has been started
    ) as child:
        stopper = _Stopper(child, marker)
        pipes = [_Pipe(child.stderr, 2, stderr)] if child.stderr is not None else []
        if child.stdout is not None and stdout is not None:
            pipes.append(_Pipe(child.stdout, 1, stdout))
        ends = float("inf") if timeout is None else time.monotonic() + timeout
        with _handlers(stopper.on_signal) as wakeups:
            timed_out = _attend(child, pipes, wakeups, stopper, ends)
        kill_processes_of(marker)
    return Ending(child.returncode, stopper.received, timed_out)


def _attend(
    child: subprocess.Popen[bytes],
    pipes: list[_Pipe],
    wakeups: socket.socket,
    stopper: _Stopper,
    ends: float,
) -> bool:
    """Pass everything on until the launcher has ended; gives whether its time was up."""
    timed_out = False
    with selectors.DefaultSelector() as selector:
        selector.register(wakeups, selectors.EVENT_READ)
        for pipe in pipes:
            selector.register(pipe.source, selectors.EVENT_READ, pipe)
        while child.poll() is None:
            _step(selector, pipes, wakeups, min(ends, stopper.deadline))
            now = time.monotonic()
            if now >= ends:
                ends, timed_out = float("inf"), True
                stopper.begin(signal.SIGTERM)
            elif now >= stopper.deadline:
                stopper.deadline = float("inf")
                stopper.escalate()
        last = time.monotonic() + _DRAIN
        while len(selector.get_map()) > 1 and time.monotonic() < last:
            _step(selector, pipes, wakeups, last)
    for pipe in pipes:
        _write(pipe.target, pipe.sieve.release())
    return timed_out


def _step(
    selector: selectors.BaseSelector, pipes: list[_Pipe], wakeups: socket.socket, until: float
) -> None:
    """Wait for something to do and do it."""
    if any(pipe.sieve.holds for pipe in pipes):
        until = min(until, time.monotonic() + _PAUSE)
    wait = None if until == float("inf") else max(0.0, until - time.monotonic())
    for key, _ in selector.select(wait):
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                wakeups.recv(4096)
        elif not key.data.pump():
            selector.unregister(key.fileobj)
    for pipe in pipes:
        pipe.release_after_pause()
