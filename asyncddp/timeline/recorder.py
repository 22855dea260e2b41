"""Takes a rank's notes: what it computes, sends, waits for and mixes, and what its user adds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any
from weakref import ref

from asyncddp.timeline import tracks
from asyncddp.timeline.clock import Sample
from asyncddp.timeline.notes import Args, Mark, Span
from asyncddp.timeline.ranges import Range, profiled
from asyncddp.timeline.waiting import SOON, Thread, Waiting
from asyncddp.timeline.writer import Writer

__all__ = ["Enqueued", "Recorder", "message_id"]

_NOTHING: AbstractContextManager[None] = nullcontext()


def message_id(source: int, target: int, name: str, number: int | str) -> str:
    """What both ends of a message call it.

    Example:
        >>> message_id(0, 2, "x", 7)
        '0>2 x 7'
    """
    return f"{source}>{target} {name} {number}"


class Recorder:
    """Takes notes from any thread of a rank; nothing in here ever waits or fails.

    Args:
        rank: Whose notes.
        writer: Who writes them; None where they are shown in other tools only.
        nvtx: Whether NVIDIA's tools see them.

    Attributes:
        cost: Seconds on a processor that writing a note takes.
    """

    def __init__(self, rank: int, writer: Writer | None, *, nvtx: bool = False) -> None:
        self.rank, self._writer, self._nvtx = rank, writer, nvtx
        self._threads: dict[int, Thread] = {}
        self._speaker: threading.Thread | None = None
        self._callers = itertools.count()
        self._activities: dict[tuple[int, str], int] = {}
        self._open: dict[int, list[str]] = {}
        self._lock = threading.Lock()
        self._claims: dict[str, ref[object]] = {}
        self.every_look: list[Callable[[], None]] = []
        """What the thread that writes calls after each look."""
        if writer is not None:
            writer.tick = self._tick
        self._title(tracks.COMPUTATION, "computation")
        self._title(tracks.COMMUNICATION, "communication")

    # what rooms above note

    def take(self, note: Span | Mark) -> None:
        """Take a note."""
        if self._writer is not None:
            self._writer.take(note)

    def span(
        self, cat: str, name: str, begin: int, end: int, args: Args = None, track: int | None = None
    ) -> None:
        """Something lasted from one time to another, in this thread where no track is given."""
        if track is None:
            track = self.thread().track
        self.take(Span(cat, name, track, begin, end, args))

    def transfer(
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
        """A tensor has gone to a peer, or come from one.

        Args:
            kind: ``"send"``, ``"receive"`` or ``"read"``.
            verb: For which verb.
            name: Under which name.
            peer: The other rank.
            nbytes: How much.
            begin: When it began.
            end: When it was over.
            number: Distinguishes the messages between two ranks under one name, alike on both.
        """
        args = {"verb": verb, "name": name, "peer": peer, "bytes": nbytes}
        if kind == "send":
            arrow, message = "s", message_id(self.rank, peer, name, number)
        else:
            arrow, message = "f", message_id(peer, self.rank, name, number)
        self.take(Span("transfer", kind, tracks.LANE, begin, end, args, arrow, message))

    def mixed(
        self, verb: str, name: str, begin: int, end: int, nbytes: int, peers: tuple[int, ...]
    ) -> None:
        """This thread has mixed a piece; pieces that follow each other are one span."""
        thread = self.thread()
        thread.mixes += 1
        if thread.waiting is not None:
            thread.waiting.went_on(begin, end)
        last = _popped(thread)
        if last is not None:
            since, until, *what, size, _ = last
            if begin - until < SOON and what == [verb, name]:
                begin, nbytes = since, nbytes + size
            else:
                self._note_mix(thread, *last)
        thread.mix.append((begin, end, verb, name, nbytes, peers))

    def waiting(self, verb: str, name: str, peers: tuple[int, ...] = ()) -> Waiting:
        """This thread begins to wait."""
        return Waiting(self, verb, name, peers)

    def enqueued(self, verb: str, name: str, nbytes: int) -> Enqueued:
        """What happens inside submits a verb, and does it where the verb is blocking."""
        return Enqueued(self, verb, name, nbytes)

    def shown(self, name: str) -> AbstractContextManager[None]:
        """What happens inside has a name in torch's profiler, and in NVIDIA's tools."""
        if self._nvtx or profiled():
            return Range(name, nvtx=self._nvtx)
        return _NOTHING

    def fact(self, name: str, args: Mapping[str, Any], at: int | None = None) -> None:
        """Something that is true of the rank, or was at a time."""
        self.take(Mark("M", name, 0, at, args))

    def clock(self, sample: Sample) -> None:
        """Rank 0's clock was so far ahead of this rank's."""
        offset, error = round(sample.offset / 1e3, 3), round(sample.error / 1e3, 3)
        self.fact("asyncddp.clock", {"offset": offset, "error": error}, sample.time)

    def claim(self, what: str, owner: object) -> bool:
        """Whether an owner is the first to note something, or the first whose former is gone."""
        with self._lock:
            known = self._claims.get(what)
            if known is None or known() is None:
                self._claims[what] = ref(owner)
                return True
        return False

    # threads

    def thread(self) -> Thread:
        """What is kept of the calling thread."""
        found = self._threads.get(threading.get_ident())
        return self._met() if found is None else found

    def _met(self) -> Thread:
        """Give a thread that is new here a track; the first one's, where that has ended."""
        me = threading.current_thread()
        with self._lock:
            if self._speaker is None or not self._speaker.is_alive():
                self._speaker, track = me, tracks.COMMUNICATION
            else:
                track = tracks.caller(next(self._callers))
                self._title(track, f"communication ({me.name})")
            thread = self._threads[threading.get_ident()] = Thread(track)
        return thread

    def works_here(self) -> None:
        """The calling thread is the one that mixes while others compute."""
        self._title(tracks.MIXING, "mixing")
        self._threads[threading.get_ident()] = Thread(tracks.MIXING)

    def settle(self, thread: Thread) -> None:
        """Note what a thread has mixed last."""
        last = _popped(thread)
        if last is not None:
            self._note_mix(thread, *last)

    def _note_mix(
        self,
        thread: Thread,
        begin: int,
        end: int,
        verb: str,
        name: str,
        nbytes: int,
        peers: tuple[int, ...],
    ) -> None:
        args = {"verb": verb, "name": name, "bytes": nbytes, "peers": list(peers)}
        self.take(Span("mix", "mix", thread.track, begin, end, args))

    # the user's own

    def start_activity(self, tensor_name: str, activity_name: str) -> bool:
        """Begin an activity of the calling thread; True."""
        key = threading.get_ident(), tensor_name
        with self._lock:
            track = self._activities.get(key)
            if track is None:
                track = self._activities[key] = tracks.activity(len(self._activities))
                self._title(track, f"{tensor_name} ({threading.current_thread().name})")
            self._open.setdefault(track, []).append(activity_name)
            self.take(Mark("B", activity_name, track, time.monotonic_ns()))
        return True

    def end_activity(self, tensor_name: str) -> bool:
        """End the last activity of the calling thread, or of another; False if there is none."""
        mine = threading.get_ident()
        with self._lock:
            every = [key for key in self._activities if key[1] == tensor_name]
            for key in sorted(every, key=lambda key: key[0] != mine):
                track = self._activities[key]
                if self._open.get(track):
                    name = self._open[track].pop()
                    self.take(Mark("E", name, track, time.monotonic_ns()))
                    return True
        return False

    # the file

    @property
    def cost(self) -> float:
        """Seconds on a processor that writing a note takes."""
        writer = self._writer
        return writer.seconds / writer.written if writer is not None and writer.written else 0.0

    def flush(self) -> None:
        """Have what was noted so far be in the file now."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End what is open, and the file; harmless when called twice."""
        for thread in list(self._threads.values()):
            self.settle(thread)
        with self._lock:
            for track, names in self._open.items():
                while names:
                    self.take(Mark("E", names.pop(), track, time.monotonic_ns()))
        if self._writer is not None:
            self.fact(
                "asyncddp.cost", {"notes": self._writer.written, "seconds": self._writer.seconds}
            )
            self._writer.close()

    def _title(self, track: int, title: str) -> None:
        self.take(Mark("M", "thread_name", track, None, {"name": title}))
        self.take(Mark("M", "thread_sort_index", track, None, {"sort_index": track}))

    def _tick(self) -> None:
        """Called by the thread that writes: note what was mixed a while ago."""
        for thread in list(self._threads.values()):
            last = _popped(thread)
            if last is not None:
                self._note_mix(thread, *last)
        for look in self.every_look:
            look()


class Enqueued:
    """Notes how long a verb's call has lasted.

    Args:
        recorder: Takes the note.
        verb: The verb.
        name: Under which name.
        nbytes: Of its tensor.
    """

    def __init__(self, recorder: Recorder, verb: str, name: str, nbytes: int) -> None:
        self._recorder = recorder
        self._capitals = verb.upper()
        op = f"MPI_{self._capitals}"  # what scripts of BlueFog look for
        self._args = {"verb": verb, "name": name, "bytes": nbytes, "op": op}

    def forget(self) -> None:
        """Nothing was done: do not note it."""
        self._args = {}

    def __enter__(self) -> Enqueued:
        self._shown = self._recorder.shown(f"ENQUEUE_{self._capitals}")
        self._shown.__enter__()
        self._begin = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        end = time.monotonic_ns()
        thread = recorder.thread()
        recorder.settle(thread)
        name = f"ENQUEUE_{self._capitals}"
        if self._args:
            recorder.take(Span("enqueue", name, thread.track, self._begin, end, self._args))
        self._shown.__exit__(kind, error, trace)


def _popped(thread: Thread) -> tuple[int, int, str, str, int, tuple[int, ...]] | None:
    """What a thread has mixed last and nobody has noted; it may be noted by two threads."""
    try:
        return thread.mix.pop()
    except IndexError:
        return None
