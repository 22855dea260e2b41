"""Crash handler: reports an uncaught exception of this rank, and then ends all ranks.

In an elastic run it ends this rank alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from asyncddp.config import Config
from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.whole_files import written_whole

if TYPE_CHECKING:
    from asyncddp.context.context import Context

_FORWARD_DELAY = 0.1  # seconds for the launcher to forward what was written
_CAUSE_DELAY = 0.5  # seconds in which a rank learns that another one of its replica is lost
_REPORT_DELAY = 0.25  # seconds for ranks that fail at the same time to report it too


class _CrashHandlerState:
    """State of the crash handler: process id, and the context with the ranks to end."""

    context: Context | None = None
    process = 0


def install_crash_handler(context: Context | None = None) -> None:
    """Install the crash handler: an uncaught exception on this rank ends all ranks."""
    _CrashHandlerState.context, _CrashHandlerState.process = context, os.getpid()
    sys.excepthook = _excepthook


def uninstall_crash_handler() -> None:
    """Uninstall the crash handler."""
    _CrashHandlerState.context = None
    if sys.excepthook is _excepthook:
        sys.excepthook = sys.__excepthook__


@contextlib.contextmanager
def joining_marker(config: Config) -> Iterator[None]:
    """Mark in a file for ``asyncddp run`` that this rank is joining, then that it has joined."""
    rank, size = launcher_rank_and_size()
    if config.report_dir is None or size == 1:
        yield
        return
    mark = Path(config.report_dir, f"joining-{rank}")
    with contextlib.suppress(OSError):  # on another machine there is no such folder
        mark.touch()
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            mark.unlink()
        raise
    with contextlib.suppress(OSError):
        mark.replace(mark.with_name(f"joined-{rank}"))


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__  # the hook of torch.distributed collects what this one prints
    end_run(error.with_traceback(trace))


def exit_code(error: BaseException) -> int:
    """Return the exit code of a Python process that ends by an uncaught exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def end_run(error: BaseException, *, is_cause: bool = False) -> NoReturn:
    """Report an uncaught error, and end all ranks with its exit code.

    A rank of a sharded replica asks first whether the loss of another one is the cause.
    In an elastic run it tells the others at once that this rank has left, and they go on.
    In a process that was forked from a rank it ends that process alone, with Python's traceback.
    Under ``asyncddp run`` it is written into ``rank-<r>.json`` in ``ASYNCDDP_REPORT_DIR``, and the
    launcher prints it, once for all ranks that fail alike; elsewhere this rank prints it. A
    ``SystemExit`` or ``KeyboardInterrupt`` is reported without a traceback.
    """
    if _CrashHandlerState.process not in (0, os.getpid()):
        _end_fork(error)
    context = _CrashHandlerState.context
    if isinstance(error, Exception) and not is_cause:
        _await_cause(context)
    rank, size = (context.rank, context.size) if context else launcher_rank_and_size()
    code = exit_code(error)
    quiet = isinstance(error, (SystemExit, KeyboardInterrupt))
    quiet = quiet or error.__traceback__ is None  # it was not raised
    text = "" if quiet else "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        summary = f"it ended with exit code {code}"
    if isinstance(error, PeerLeftError):
        text = ""  # the rank that left has said why
    # a rank on which the error did not begin lets the one report it on which it did
    elsewhere = isinstance(error, PeerError) and error.origin not in (None, rank)
    sys.stdout.flush()
    wait = _FORWARD_DELAY
    if _write_report(rank, code, error, text):  # asyncddp run says it, once for all
        wait = _REPORT_DELAY + 0.5 * elsewhere
    elif not isinstance(error, KeyboardInterrupt):
        time.sleep(0.0 if quiet else min(0.4 * rank, 2.0) + 2.0 * elsewhere)
        sys.stderr.write(f"[asyncddp] rank {rank} of {size} failed: {summary}\n{text}")
    sys.stderr.flush()
    if context is not None and context.size > 1:
        # an elastic run's transport tells the others alone, whose reports nothing cuts short
        time.sleep(0.0 if context.config.elastic else wait)
        context.transport.abort(code)
    os._exit(code)


def _await_cause(context: Context | None) -> None:
    """Let the loss of another rank of a sharded replica end this process, if it is the cause.

    A process group of torch.distributed may see it first.
    """
    end = time.monotonic() + _CAUSE_DELAY
    while context is not None and context.engine.on_failure and time.monotonic() < end:
        context.engine.progress()
        time.sleep(0.01)


def _end_fork(error: BaseException) -> NoReturn:
    """End a process forked from a rank, without running the rank's exit handlers."""
    if not isinstance(error, SystemExit):
        sys.__excepthook__(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def _is_rank_process(folder: Path, rank: int) -> bool:
    """Return True if this process registered as the rank, and is no child of the rank."""
    try:
        signed = Path(folder, f"started-{rank}").read_text(encoding="utf8").split()
    except OSError:
        return True  # no Python script of asyncddp run: nobody has signed in
    return not signed or signed[0] == str(os.getpid())


def _write_report(rank: int, code: int, error: BaseException, trace: str) -> bool:
    """Write the error report for ``asyncddp run``; return False if it cannot be written."""
    folder = Config.from_environment().report_dir
    if folder is None or not Path(folder).is_dir() or not _is_rank_process(Path(folder), rank):
        return False
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
    path = Path(folder, f"rank-{rank}.json")
    try:
        with written_whole(path) as begun:
            begun.write_text(json.dumps(report), encoding="utf8")
    except OSError as problem:
        sys.stderr.write(f"[asyncddp] rank {rank} could not write its report: {problem}\n")
        return False
    return True
