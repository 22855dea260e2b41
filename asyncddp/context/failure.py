"""What a failing rank says before it takes the others down."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from asyncddp.config import Config
from asyncddp.context.launched import launched_as
from asyncddp.errors import PeerError, PeerLeftError

if TYPE_CHECKING:
    from asyncddp.context.context import Context

__all__ = ["end_run", "unwatch", "watch"]


class _Watched:
    """The context whose ranks end when this one fails, and the process that is this rank."""

    context: Context | None = None
    process = 0


def watch(context: Context | None = None) -> None:
    """From now on an uncaught exception on this rank ends all ranks.

    Args:
        context: The world; None while it is being made.
    """
    _Watched.context, _Watched.process = context, os.getpid()
    sys.excepthook = _excepthook


def unwatch() -> None:
    """No longer."""
    _Watched.context = None
    if sys.excepthook is _excepthook:
        sys.excepthook = sys.__excepthook__


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    end_run(error.with_traceback(trace))


def exit_code(error: BaseException) -> int:
    """The exit code that an uncaught exception gives a Python process.

    Example:
        >>> exit_code(SystemExit(3)), exit_code(ValueError("x")), exit_code(KeyboardInterrupt())
        (3, 1, 130)
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def end_run(error: BaseException) -> NoReturn:
    """Report an error that nobody caught, and end all ranks with its exit code.

    In a process that was forked from a rank it ends that process alone, with Python's traceback.
    Writes ``rank-<r>.json`` into ``ASYNCDDP_REPORT_DIR`` where that is set.

    Args:
        error: What was raised; a ``SystemExit`` or ``KeyboardInterrupt`` is reported without a
            traceback.
    """
    if _Watched.process not in (0, os.getpid()):
        _end_fork(error)
    context = _Watched.context
    rank, size = (context.rank, context.size) if context else launched_as(os.environ)
    code = exit_code(error)
    quiet = isinstance(error, (SystemExit, KeyboardInterrupt))
    quiet = quiet or error.__traceback__ is None  # it was not raised
    text = "" if quiet else "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        summary = f"it ended with exit code {code}"
    time.sleep(_turn(error, rank))
    if isinstance(error, PeerLeftError):
        text = ""  # the rank that left has said why
    if not isinstance(error, KeyboardInterrupt):
        head = f"[asyncddp] rank {rank} of {size} failed: {summary}\n"
        sys.stderr.write(head + text)
    sys.stdout.flush()
    sys.stderr.flush()
    _leave_report(rank, code, error, text)
    if context is not None and context.size > 1:
        time.sleep(0.1)  # lets the launcher forward what was just written
        context.transport.abort(code)
    os._exit(code)


def _end_fork(error: BaseException) -> NoReturn:
    """End a process that was forked from a rank, without what the rank does at its end."""
    if not isinstance(error, SystemExit):
        sys.__excepthook__(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def _turn(error: BaseException, rank: int) -> float:
    """Seconds before a rank speaks: first the one where it began, of several the lowest."""
    if not isinstance(error, PeerError) or isinstance(error, PeerLeftError):
        return 0.0
    told = error.origin not in (None, rank)
    return min(0.15 * rank, 2.0) + 0.5 * told


def _leave_report(rank: int, code: int, error: BaseException, trace: str) -> None:
    folder = Config.from_environment().report_dir
    if folder is None or not Path(folder).is_dir():
        return
    report = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "exit_code": code,
        "kind": type(error).__name__,
        "message": str(error),
        "origin": error.origin if isinstance(error, PeerError) else None,
        "traceback": trace,
        "time": time.time(),
    }
    try:
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf8")
    except OSError as problem:
        sys.stderr.write(f"[asyncddp] rank {rank} could not write its report: {problem}\n")
