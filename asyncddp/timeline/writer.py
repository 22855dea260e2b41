"""The thread that writes a rank's notes to its file, while the run goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from asyncddp.errors import ArgumentError
from asyncddp.timeline.notes import Lines, Note

__all__ = ["Writer"]

logger = logging.getLogger("asyncddp")

_EVERY = 0.04  # seconds between two looks
_CHUNK = 64  # notes after which other threads may go on
_LINES = 512  # lines in one write


class Writer:
    """Takes notes from any thread and writes them, whole lines at a time.

    What was noted is in the file 0.05 seconds later, unless the machine is overloaded; so a rank
    that is killed leaves a file that can be read. Where the disk is full, one warning says so, and
    nothing is recorded any more.

    Args:
        path: The file; its folder is made where it is missing, what it held is lost.
        rank: Whose notes.
        tick: Called by the thread after each look.

    Attributes:
        take: Takes a note; what any thread calls.
        written: Notes that were written.
        seconds: Time on a processor that this has taken.

    Raises:
        ArgumentError: The file cannot be made.
    """

    def __init__(self, path: Path, rank: int, tick: Callable[[], None] = lambda: None) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as problem:
            raise ArgumentError(
                f"ASYNCDDP_TIMELINE: expected a folder or prefix that rank {rank} can write to, "
                f"got {str(path)!r}: {problem.strerror}"
            ) from problem
        self.path, self.tick = path, tick
        self._notes: deque[Note] = deque()
        self.take: Callable[[Note], None] = self._notes.append
        self.written, self.seconds = 0, 0.0
        self._rank, self._lines = rank, Lines(rank)
        self._over, self._draining = threading.Event(), threading.Lock()
        name = f"asyncddp-timeline-{rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._write(b"[\n")
        self._thread.start()

    def flush(self) -> None:
        """Have what was noted so far be in the file now; for any thread."""
        self._drain()

    def close(self) -> None:
        """Write what is left, and end the file as strict JSON; harmless when called twice."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if not self._file.closed:
            if self.written:
                self._file.seek(-2, os.SEEK_END)  # the last comma
            self._write(b"\n]\n")
            self._stop()

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self._drain()
            self.tick()
        self._drain()

    def _drain(self) -> None:
        with self._draining:
            began, lines = time.thread_time(), list[str]()
            while self._notes:
                for _ in range(min(_CHUNK, len(self._notes))):
                    lines += self._lines.of(self._notes.popleft())
                    self.written += 1
                if len(lines) > _LINES:
                    self._put(lines)
                    lines = []
                if self._notes:
                    time.sleep(0)  # a thread that computes may be waiting for the interpreter
            self._put(lines)
            self.seconds += time.thread_time() - began

    def _put(self, lines: list[str]) -> None:
        """Write lines, each with the comma after it."""
        if lines and not self._file.closed:
            self._write(",\n".join([*lines, ""]).encode())

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as problem:
            self._stop()
            logger.warning(
                "rank %d: %s cannot be written any more, so that the timeline ends here: %s",
                self._rank,
                self.path,
                problem.strerror,
            )

    def _stop(self) -> None:
        """Take no notes any more."""
        nothing: deque[Note] = deque(maxlen=0)
        self.take = nothing.append
        self._file.close()
        self._notes.clear()
