"""Runs the launcher: passes output and signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import functools
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

from asyncddp.launch.processes import die_with_parent, kill_processes_of
from asyncddp.launch.roll_call import RollCall
from asyncddp.launch.sieve import Sieve

__all__ = ["Ending", "supervise"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 5.0  # seconds between one way of asking the launcher to end and the next
_PAUSE = 0.2  # seconds after which a writer's unfinished line is shown
_DRAIN = 0.5  # seconds to read what is left after the launcher has ended
_LOOK = 0.2  # seconds between two looks at who has signed in and who has reported
_LINGER = 3.0  # seconds that a launcher has to end after a rank has reported its failure


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: The launcher's exit code; negative for the signal that killed it.
        signal: The first signal that this process was sent meanwhile.
        timed_out: Whether the run was ended because its time was up.
        lost: Ranks of this machine that left without having finished, in order.
        ended: Ranks of this machine that came to the end of their scripts.
        stranded: Ranks that were ended in ``init()``, where they waited for one that had left.
    """

    code: int
    signal: int | None
    timed_out: bool
    lost: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    stranded: tuple[int, ...] = ()


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
        """Show an unfinished line that nothing has followed for a while."""
        if self.sieve.holds and time.monotonic() - self.quiet_since >= _PAUSE:
            _write(self.target, self.sieve.release())
        _write(self.target, self.sieve.due())


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
        """Ask the launcher to end, and see to it that it does."""
        self._next = [lambda: self._send(signal.SIGTERM), self._kill]
        self._send(number)

    def escalate(self) -> None:
        """Take the next, firmer step."""
        self.deadline = float("inf")
        if self._next:
            self._next.pop(0)()

    def _send(self, number: int) -> None:
        self.deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        kill_processes_of(self._marker)


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
    reports: tuple[str, Path],
    sieves: tuple[Sieve | None, Sieve],
    timeout: float | None = None,
    started: Callable[[int], None] = lambda process: None,
) -> Ending:
    """Run a launcher to its end.

    It runs in a session of its own, so that Ctrl-C reaches this process alone, which passes it on:
    ranks are then ended in the launcher's orderly way, and a second Ctrl-C kills them all.

    Args:
        arguments: The launcher's command line.
        environment: Its environment, to which the report folder is added.
        reports: Variable that tells the ranks of the report folder, and that folder: together
            they mark the run's processes.
        sieves: What to take out of standard output, which is passed on as it is where that is
            None, and of standard error.
        timeout: Seconds after which the run is ended.
        started: Called with the launcher's process number once it runs.
    """
    stdout, stderr = sieves
    name, folder = reports
    marker = f"{name}={folder}"
    with subprocess.Popen(
        list(arguments),
        env={**environment, name: str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=None if stdout is None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),  # safe: no thread has been started
    ) as child:
        started(child.pid)
        stopper = _Stopper(child, marker)
        pipes = [_Pipe(child.stderr, 2, stderr)] if child.stderr is not None else []
        if child.stdout is not None and stdout is not None:
            pipes.append(_Pipe(child.stdout, 1, stdout))
        ends = float("inf") if timeout is None else time.monotonic() + timeout
        with _handlers(stopper.on_signal) as wakeups, _Watch(pipes, wakeups, folder) as watch:
            timed_out, stranded = _attend(child, watch, stopper, ends)
        kill_processes_of(marker)
    roll = watch.roll
    return Ending(
        child.returncode,
        stopper.received,
        timed_out,
        lost=tuple(roll.lost),
        ended=roll.ended(),
        stranded=stranded,
    )


class _Watch:
    """Waits for whatever happens next: output, signals, ranks that come and go."""

    def __init__(self, pipes: list[_Pipe], wakeups: socket.socket, folder: Path) -> None:
        self.roll = RollCall(folder)
        self._pipes, self._wakeups = pipes, wakeups
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeups, selectors.EVENT_READ, self._drain)
        for pipe in pipes:
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe.pump)

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self.roll.close()

    def _drain(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wakeups.recv(4096)
        return True

    def look(self) -> None:
        """See who has signed in."""
        for rank, descriptor in self.roll.newcomers().items():
            self._selector.register(
                descriptor, selectors.EVENT_READ, functools.partial(self.roll.left, rank)
            )

    def step(self, until: float) -> None:
        """Wait until something happens, at most until then, and deal with it."""
        if any(pipe.sieve.holds for pipe in self._pipes):
            until = min(until, time.monotonic() + _PAUSE)
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if not key.data():
                self._selector.unregister(key.fileobj)
        for pipe in self._pipes:
            pipe.release_after_pause()

    def finish(self) -> None:
        """Pass on what is left after the launcher has ended."""
        last = time.monotonic() + _DRAIN
        sources = {pipe.source for pipe in self._pipes}
        while sources & self._registered() and time.monotonic() < last:
            self.step(last)
        for pipe in self._pipes:
            _write(pipe.target, pipe.sieve.release() + pipe.sieve.due(at_end=True))

    def _registered(self) -> set[object]:
        return {key.fileobj for key in self._selector.get_map().values()}


def _attend(
    child: subprocess.Popen[bytes], watch: _Watch, stopper: _Stopper, ends: float
) -> tuple[bool, tuple[int, ...]]:
    """Pass everything on until the launcher has ended.

    Returns:
        Whether its time was up, and the ranks that had to be ended in ``init()``, since another one
        had left before it joined them.
    """
    timed_out, reported = False, float("inf")
    stranded: tuple[int, ...] = ()
    while child.poll() is None:
        watch.look()
        watch.step(min(ends, stopper.deadline, time.monotonic() + _LOOK))
        now = time.monotonic()
        if now >= ends:
            ends, timed_out = float("inf"), True
            stopper.begin(signal.SIGTERM)
        if now >= stopper.deadline:
            stopper.escalate()
        waiting = watch.roll.stranded()
        reported = min(reported, now) if waiting or watch.roll.has_reports() else float("inf")
        if now >= reported + _LINGER and stopper.deadline == float("inf"):
            stranded = waiting
            stopper.begin(signal.SIGTERM)  # Hydra waits for the others where MPI was not started
    watch.finish()
    return timed_out, stranded
