"""The processes of a run, as each launcher treats them: signals, output, and how they are ended."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

FORWARDED_SIGNALS = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGALRM}
)
"""Signals that are passed on to the ranks, as mpirun does; they end no run."""
TERMINATION_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
ESCALATION_INTERVAL = 5.0  # seconds between two ever stronger signals


@contextlib.contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], None],
    numbers: Iterable[signal.Signals] = TERMINATION_SIGNALS,
) -> Iterator[None]:
    """Handle signals in the block, unless they are ignored, as SIGHUP is under nohup."""
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def delivered(number: int) -> int:
    """Return the signal that ranks get for one to be forwarded.

    It is SIGSTOP for SIGTSTP, which has no effect on processes in a session of their own.
    """
    return signal.SIGSTOP if number == signal.SIGTSTP else number


def write_all(target: int, data: bytes) -> None:
    """Write all bytes; a reader that has gone, as ``| head`` does, or a full disk ends no run."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except OSError as problem:
            if not isinstance(problem, BrokenPipeError):
                _warn_of_loss(target, problem.strerror)
            return


@functools.cache
def _warn_of_loss(target: int, why: str) -> None:
    """Say once on standard error that output is lost."""
    words = f"asyncddp run: output of ranks is lost: {why} (descriptor {target})\n"
    with contextlib.suppress(OSError):
        os.write(2, words.encode())


class RankProcesses:
    """Processes that end together: those that stay get ever stronger signals.

    Args:
        send: Sends a signal to all of them.
        abort_signal: Makes them end soon.
    """

    def __init__(self, send: Callable[[int], None], abort_signal: int = signal.SIGTERM) -> None:
        self.send, self._abort_signal = send, abort_signal
        self._stronger: list[int] = []
        self.deadline = math.inf
        """Time of the next, stronger signal."""

    def end_within(self, seconds: float) -> None:
        """Let the processes end by themselves for some seconds, then begin to end them."""
        self._stronger = [self._abort_signal, signal.SIGKILL]
        self.deadline = time.monotonic() + seconds

    def escalate_if_due(self) -> bool:
        """Send the next, stronger signal if it is time; return whether it was."""
        if time.monotonic() < self.deadline:
            return False
        self.send(self._stronger.pop(0))
        self.deadline = time.monotonic() + ESCALATION_INTERVAL if self._stronger else math.inf
        return True
