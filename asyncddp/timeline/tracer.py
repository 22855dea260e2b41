"""Tracer of one rank: records computation, sends, waits, averaging and the user's spans."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd import profiler

import asyncddp
from asyncddp.config import Config
from asyncddp.timeline import tracks
from asyncddp.timeline.chrome_trace import Args, SingleTimestampEvent, Span, track_title
from asyncddp.timeline.profiler_range import ProfilerRange
from asyncddp.timeline.thread_spans import CallSpan, ThreadTracingState, WaitSpan
from asyncddp.timeline.trace_writer import TraceWriter

_NO_RANGE: AbstractContextManager[None] = nullcontext()


class ClockSample(NamedTuple):
    r"""Measured offset of rank 0's clock from this rank's, and the measurement's time, in ns.

    A rank asks at :math:`t_1`, and rank 0's answer, its time :math:`t_0`, arrives at :math:`t_2`.
    Then its clock is ahead by
    :math:`t_0 - \tfrac{1}{2} (t_1 + t_2) \pm \tfrac{1}{2} (t_2 - t_1)`.

    Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
    """

    time: int
    offset: int
    error: int

    @classmethod
    def from_round_trip(cls, sent: int, answer: int, received: int) -> ClockSample:
        """Estimate the offset from a request's time, its answer, and the answer's arrival."""
        middle = (sent + received) // 2
        return cls(middle, answer - middle, max(1, (received - sent + 1) // 2))


class Tracer:
    """Recorder of trace events of one rank, from any thread; it never blocks and never raises.

    Without a writer only profilers show them, and with ``nvtx`` NVIDIA's tools.
    """

    def __init__(self, rank: int, writer: TraceWriter | None, *, nvtx: bool = False) -> None:
        self.rank, self._writer, self._nvtx = rank, writer, nvtx
        self._threads: dict[int, ThreadTracingState] = {}
        self._main_thread: threading.Thread | None = None
        self._callers = itertools.count()
        self._activities: dict[tuple[int, str], tuple[int, list[str]]] = {}  # track, open ones
        self._lock = threading.Lock()
        self._claims: WeakValueDictionary[str, object] = WeakValueDictionary()
        self.flush_callbacks: list[Callable[[], None]] = []
        """Functions that the writer thread calls after each flush of its queue."""
        if writer is not None:
            writer.on_flush = self._on_flush
        self._title(tracks.COMPUTATION, "computation")
        self._title(tracks.COMMUNICATION, "communication")

    # events that the packages above record

    def record(self, event: Span | SingleTimestampEvent) -> None:
        """Pass an event to the writer thread."""
        if self._writer is not None:
            self._writer.append(event)

    def record_span(
        self, cat: str, name: str, begin: int, end: int, args: Args = None, track: int | None = None
    ) -> None:
        """Record a time span, by default on the calling thread's track."""
        if track is None:
            track = self.current_thread().track
        self.record(Span(cat, name, track, begin, end, args))

    def record_transfer(
        self,
        kind: str,
        verb: str,
        name: str,
        peer: int,
        nbytes: int,
        begin: int,
        end: int,
        number: int | str,
    ) -> None:
        """Record a message of kind ``"send"``, ``"receive"`` or ``"read"`` (read in place).

        ``number`` counts the messages of one name between two ranks, and is equal on both.
        """
        args = {"verb": verb, "name": name, "peer": peer, "bytes": nbytes}
        sent = kind == "send"
        arrow, source, target = ("s", self.rank, peer) if sent else ("f", peer, self.rank)
        message = f"{source}>{target} {name} {number}"
        self.record(Span("transfer", kind, tracks.TRANSFER_TRACK, begin, end, args, arrow, message))

    def record_mix(
        self, verb: str, name: str, begin: int, end: int, nbytes: int, peers: tuple[int, ...]
    ) -> None:
        """Record that this thread averaged a piece; merge consecutive pieces into one span."""
        self.current_thread().record_mix(verb, name, begin, end, nbytes, peers)

    def start_wait(self, verb: str, name: str, peers: tuple[int, ...] = ()) -> WaitSpan:
        """Begin a wait of the calling thread; the caller ends the returned span."""
        return WaitSpan(self.current_thread(), verb, name, peers)

    def enqueue_span(self, verb: str, name: str, nbytes: int) -> CallSpan:
        """Return a context manager that records the duration of an operation's call."""
        capitals = verb.upper()
        title = f"ENQUEUE_{capitals}"
        op = f"MPI_{capitals}"  # what scripts of BlueFog look for
        args = {"verb": verb, "name": name, "bytes": nbytes, "op": op}
        return CallSpan(self.current_thread(), title, args, self.profiler_range(title))

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that names its block for torch's profiler and NVTX."""
        if self._nvtx or profiler._is_profiler_enabled:
            return ProfilerRange(name, nvtx=self._nvtx)
        return _NO_RANGE

    def record_metadata(self, name: str, args: Mapping[str, Any], at: int | None = None) -> None:
        """Record metadata of the rank, optionally valid from a given time on."""
        self.record(SingleTimestampEvent("M", name, 0, at, args))

    def record_clock_offset(self, sample: ClockSample) -> None:
        """Record a measured offset of rank 0's clock from this rank's clock."""
        offset, error = round(sample.offset / 1e3, 3), round(sample.error / 1e3, 3)
        self.record_metadata("asyncddp.clock", {"offset": offset, "error": error}, sample.time)

    def claim(self, what: str, owner: object) -> bool:
        """Make an object the only recorder of a kind of event; False if another has claimed it."""
        with self._lock:
            return self._claims.setdefault(what, owner) is owner

    # threads

    def current_thread(self) -> ThreadTracingState:
        """Return the tracing state of the calling thread."""
        found = self._threads.get(threading.get_ident())
        return self._register_thread() if found is None else found

    def _register_thread(self) -> ThreadTracingState:
        """Assign a track to a new thread; the main communication track if it is free."""
        me = threading.current_thread()
        with self._lock:
            if self._main_thread is None or not self._main_thread.is_alive():
                self._main_thread, track = me, tracks.COMMUNICATION
            else:
                track = tracks.thread_track(next(self._callers))
                self._title(track, f"communication ({me.name})")
            thread = self._threads[threading.get_ident()] = ThreadTracingState(track, self.record)
        return thread

    def mark_progress_thread(self) -> None:
        """Mark the calling thread as the progress thread, which averages in background."""
        self._title(tracks.MIXING, "mixing")
        self._threads[threading.get_ident()] = ThreadTracingState(tracks.MIXING, self.record)

    # activities of the user

    def start_activity(self, tensor_name: str, activity_name: str) -> bool:
        """Begin an activity of the calling thread; return True."""
        key = threading.get_ident(), tensor_name
        with self._lock:
            if key not in self._activities:
                self._activities[key] = tracks.activity_track(len(self._activities)), []
                title = f"{tensor_name} ({threading.current_thread().name})"
                self._title(self._activities[key][0], title)
            track, names = self._activities[key]
            names.append(activity_name)
            self.record(SingleTimestampEvent("B", activity_name, track, time.monotonic_ns()))
        return True

    def end_activity(self, tensor_name: str) -> bool:
        """End the last activity of this or another thread; return False if none is open."""
        mine = threading.get_ident()
        with self._lock:
            every = [key for key in self._activities if key[1] == tensor_name]
            for key in sorted(every, key=lambda key: key[0] != mine):
                track, names = self._activities[key]
                if names:
                    self.record(SingleTimestampEvent("E", names.pop(), track, time.monotonic_ns()))
                    return True
        return False

    # the file

    @property
    def cost(self) -> float:
        """CPU time in seconds to write one event."""
        writer = self._writer
        return writer.seconds / writer.written if writer is not None and writer.written else 0.0

    def flush(self) -> None:
        """Write all events recorded so far to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End open activities and close the file; harmless when called twice."""
        self._flush_mixes()
        with self._lock:
            for track, names in self._activities.values():
                while names:
                    self.record(SingleTimestampEvent("E", names.pop(), track, time.monotonic_ns()))
        if self._writer is not None:
            self.record_metadata(
                "asyncddp.cost", {"notes": self._writer.written, "seconds": self._writer.seconds}
            )
            self._writer.close()

    def _title(self, track: int, title: str) -> None:
        for event in track_title(track, title):
            self.record(event)

    def _flush_mixes(self) -> None:
        for thread in list(self._threads.values()):
            thread.flush_mix()

    def _on_flush(self) -> None:
        self._flush_mixes()
        for callback in self.flush_callbacks:
            callback()


class GroupTracer(Tracer):
    """Tracer of a group's context, which records in its world's, by ranks of the world.

    Args:
        world: The world's tracer.
        ranks: The members' ranks in it.
    """

    def __init__(self, world: Tracer, ranks: Sequence[int]) -> None:
        vars(self).update(vars(world))
        self._ranks = tuple(ranks)

    def record_transfer(self, kind: str, verb: str, name: str, peer: int, *facts: Any) -> None:
        """Record a message of a member."""
        super().record_transfer(kind, verb, name, self._ranks[peer], *facts)

    def record_mix(
        self, verb: str, name: str, begin: int, end: int, nbytes: int, peers: tuple[int, ...]
    ) -> None:
        """Record an average with members."""
        of_world = tuple(self._ranks[peer] for peer in peers)
        super().record_mix(verb, name, begin, end, nbytes, of_world)

    def start_wait(self, verb: str, name: str, peers: tuple[int, ...] = ()) -> WaitSpan:
        """Begin a wait for members."""
        return WaitSpan(self.current_thread(), verb, name, peers, self._ranks)

    def close(self) -> None:
        """Do nothing: the world closes the file."""


def trace_path(where: str, rank: int) -> Path:
    """Return a rank's trace file path for a folder, a ``{rank}`` pattern, or a prefix."""
    if "{rank}" in where:
        return Path(where.replace("{rank}", str(rank)))
    in_folder = where.endswith(os.sep) or Path(where).is_dir()
    return Path(where, f"rank{rank}.json") if in_folder else Path(f"{where}{rank}.json")


def create_tracer(config: Config, rank: int, size: int) -> Tracer | None:
    """Create the tracer configured for a rank, or return None."""
    nvtx = config.nvtx and torch.cuda.is_available()
    if config.timeline is None:
        return Tracer(rank, None, nvtx=True) if nvtx else None
    tracer = Tracer(rank, TraceWriter(trace_path(config.timeline, rank), rank), nvtx=nvtx)
    host = socket.gethostname()
    tracer.record_metadata("process_name", {"name": f"rank {rank} on {host}"})
    tracer.record_metadata("process_sort_index", {"sort_index": rank})
    facts = {"rank": rank, "size": size, "host": host, "version": 1}
    facts |= {"library": asyncddp.__version__, "started_unix": time.time()}
    tracer.record_metadata("asyncddp.rank", facts)
    return tracer
