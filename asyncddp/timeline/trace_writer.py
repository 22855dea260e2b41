"""Writer thread that appends a rank's trace events to its file during the run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from asyncddp.errors import ArgumentError
from asyncddp.timeline.chrome_trace import ChromeTraceFormatter, TraceEvent

logger = logging.getLogger("asyncddp")

_INTERVAL = 0.04  # seconds between two flushes
_CHUNK = 64  # events after which the interpreter lock is yielded
_LINES = 512  # lines in one write


class TraceWriter:
    """Writer of trace events from all threads; its own thread writes them to a file.

    An event is in the file 0.05 seconds later, so that a rank that is killed leaves a readable
    file. Where the disk is full, one warning says so, and nothing is recorded any more.
    """

    def __init__(self, path: Path, rank: int) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as problem:
            raise ArgumentError(
                f"ASYNCDDP_TIMELINE: expected a folder or prefix that rank {rank} can write to, "
                f"got {str(path)!r}: {problem.strerror}"
            ) from problem
        self.path = path
        self.on_flush: Callable[[], None] = lambda: None
        """Called by the writer thread after each flush."""
        self._events: deque[TraceEvent] = deque()
        self.append: Callable[[TraceEvent], None] = self._events.append
        """Queues an event; any thread may call it."""
        self.written, self.seconds = 0, 0.0  # events written, and CPU time that this has taken
        self._rank, self._formatter = rank, ChromeTraceFormatter(rank)
        self._closed, self._draining = threading.Event(), threading.Lock()
        name = f"asyncddp-timeline-{rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._write(b"[\n")
        self._thread.start()

    def close(self) -> None:
        """Write all queued events and end the file as strict JSON; harmless when called twice."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if not self._file.closed:
            if self.written:
                self._file.seek(-2, os.SEEK_END)  # the last comma
            self._write(b"\n]\n")
            self._stop()

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            self.flush()
            self.on_flush()
        self.flush()

    def flush(self) -> None:
        """Write all events queued so far; any thread may call this."""
        with self._draining:
            began, lines = time.thread_time(), list[str]()
            while self._events:
                for _ in range(min(_CHUNK, len(self._events))):
                    lines += self._formatter.format(self._events.popleft())
                    self.written += 1
                if len(lines) > _LINES:
                    self._put(lines)
                    lines = []
                if self._events:
                    time.sleep(0)  # a thread that computes may be waiting for the interpreter
            self._put(lines)
            self.seconds += time.thread_time() - began

    def _put(self, lines: list[str]) -> None:
        if lines and not self._file.closed:
            self._write(",\n".join([*lines, ""]).encode())

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as problem:
            self._stop()
            text = "rank %d: %s cannot be written any more, so that the timeline ends here: %s"
            logger.warning(text, self._rank, self.path, problem.strerror)

    def _stop(self) -> None:
        """Close the file and drop later events."""
        nothing: deque[TraceEvent] = deque(maxlen=0)
        self.append = nothing.append
        self._file.close()
        self._events.clear()
