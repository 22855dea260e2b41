"""The ranks' files as one, on rank 0's clock, for Perfetto.

Everything streams: of each file one line is held, and of each arrow the end that came first.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias, cast

from asyncddp.errors import ArgumentError
from asyncddp.timeline.merge_clocks import Clock, clocks_of
from asyncddp.timeline.reading import Event, RankFile, find_files, read_events, scan

__all__ = ["Arrows", "Merge", "open_ranks", "write"]

Advance: TypeAlias = Callable[[Path, int], object]

_encode = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_HELD = 100_000  # ends of arrows that wait for their other ends


def _no_advance(_: Path, __: int) -> None:
    """Progress that nobody watches."""


class Arrows:
    """Keep an arrow once both of its ends are there, and number it.

    Perfetto drops arrows whose names are not numbers, and those with one end lead nowhere. The end
    that comes first waits for the other; the oldest gives up where too many wait.

    Args:
        held: How many may wait.

    Attributes:
        kept: Arrows with both ends.

    Example:
        >>> arrows = Arrows()
        >>> events = [{"ph": "s", "id": "0>1"}, {"ph": "s", "id": "0>2"}, {"ph": "f", "id": "0>1"}]
        >>> list(arrows.matched(events))
        [{'ph': 's', 'id': 1}, {'ph': 'f', 'id': 1}]
        >>> arrows.kept, arrows.dropped
        (1, 1)
    """

    def __init__(self, held: int = _HELD) -> None:
        self.kept = 0
        self._given_up = 0
        self._held = held
        self._waiting: dict[tuple[str, str], Event] = {}

    @property
    def dropped(self) -> int:
        """Ends whose other end is in no file."""
        return self._given_up + len(self._waiting)

    def matched(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events without arrows that have one end only."""
        for event in events:
            if event["ph"] in ("s", "f"):
                yield from self._match(event)
            else:
                yield event

    def _match(self, event: Event) -> Iterator[Event]:
        name = str(event.get("id"))
        other = self._waiting.pop((name, "f" if event["ph"] == "s" else "s"), None)
        if other is None:
            self._given_up += (name, event["ph"]) in self._waiting
            self._waiting[name, event["ph"]] = event
            if len(self._waiting) > self._held:
                del self._waiting[next(iter(self._waiting))]
                self._given_up += 1
            return
        self.kept += 1
        for end in (other, event) if event["ph"] == "f" else (event, other):
            yield {**end, "id": self.kept}


@dataclass(frozen=True)
class Merge:
    """Ranks' files, ready to be read as one.

    Attributes:
        files: Of the ranks that left one, in order of rank.
        size: How many ranks there were.
        silent: Files in which nothing is.
        clocks: Each rank's way to rank 0's clock.
        origin: Time on rank 0's clock that becomes 0, in µs: rank 0's start, or another rank's
            first event where that is earlier, because viewers drop what is negative.
        arrows: What was kept and dropped, once the events were read.
    """

    files: tuple[RankFile, ...]
    size: int
    silent: tuple[Path, ...]
    clocks: dict[int, Clock]
    origin: float
    arrows: Arrows

    @property
    def missing(self) -> list[int]:
        """The ranks of which no events are there."""
        return sorted(set(range(self.size)) - {file.rank for file in self.files})

    @property
    def unmeasured(self) -> list[int]:
        """The ranks that are placed by wall clocks."""
        return [rank for rank, clock in self.clocks.items() if not clock.measured]

    @property
    def clock_error(self) -> float | None:
        """The largest error of any rank's clock in µs; None where one is not known."""
        errors = [self.clocks[file.rank].error(file.first, file.last) for file in self.files]
        known = [error for error in errors if error is not None]
        return max(known) if len(known) == len(errors) else None

    @property
    def drift(self) -> float:
        """The largest drift of a clock that is more than errors of measurement, as a fraction."""
        return max((clock.drift() for clock in self.clocks.values() if clock.drifting), default=0.0)

    def events(self, advance: Advance = _no_advance) -> Iterator[Event]:
        """All events on rank 0's clock, nearly in order of time.

        Args:
            advance: Called now and then with a file and the bytes of it that were read.

        Raises:
            ArgumentError: If a line other than a file's last is no event.
        """
        yield _metadata(
            "asyncddp.merged",
            version=1,
            size=self.size,
            ranks=[file.rank for file in self.files],
            missing=self.missing,
            clock_error=self.clock_error,
            clock_unmeasured=self.unmeasured,
        )
        streams = (_aligned(f, self.clocks[f.rank], self.origin, advance) for f in self.files)
        merged = heapq.merge(*streams, key=lambda pair: pair[0])
        yield from self.arrows.matched(event for _, event in merged)
        yield _metadata("asyncddp.arrows", kept=self.arrows.kept, dropped=self.arrows.dropped)


def _metadata(name: str, **args: object) -> Event:
    return {"name": name, "ph": "M", "pid": 0, "tid": 0, "args": args}


def _aligned(
    file: RankFile, clock: Clock, origin: float, advance: Advance
) -> Iterator[tuple[float, Event]]:
    """A rank's events on rank 0's clock, each with the time at which it was over."""
    over = 0.0
    for event in read_events(file.path, partial(advance, file.path)):
        if event.get("name") == "asyncddp.clock":
            continue
        if "ts" in event:
            begin = event["ts"]
            event["ts"] = over = round(clock(begin) - origin, 3)
            if "dur" in event:  # by its end, so that what ends together goes on doing so
                over = round(clock(begin + event["dur"]) - origin, 3)
                event["dur"] = round(over - event["ts"], 3)
        yield over, event


def open_ranks(sources: Iterable[str | Path], advance: Advance = _no_advance) -> Merge:
    """Read what the files of a run say of themselves, and see that they belong together.

    Args:
        sources: Folders, prefixes, or names of ranks' files.
        advance: Called now and then with a file and the bytes of it that were read.

    Raises:
        ArgumentError: If a source leads to no file, a file is no rank's timeline, none holds an
            event, two are of the same rank, or they are of runs with different numbers of ranks.
    """
    paths = find_files(sources)
    if not paths:
        raise ArgumentError("timelines of no rank were given; give a folder, a prefix, or files.")
    scanned = [(path, scan(path, partial(advance, path))) for path in paths]
    files = sorted((file for _, file in scanned if file is not None), key=lambda f: f.rank)
    silent = tuple(path for path, file in scanned if file is None)
    if not files:
        raise ArgumentError(
            f"{', '.join(map(str, silent))}: empty; the run was ended before it wrote an event. "
            "Run it again."
        )
    _check_together(files)
    clocks = clocks_of(files)
    starts = [clocks[file.rank](file.first) for file in files]
    origin = min(clocks[files[0].rank](files[0].start), *starts)
    return Merge(tuple(files), files[0].size, silent, clocks, origin, Arrows())


def _check_together(files: Sequence[RankFile]) -> None:
    for one, other in itertools.pairwise(files):
        if one.rank == other.rank:
            raise ArgumentError(
                f"{one.path} and {other.path} are both of rank {one.rank}; give the files of one "
                "run, a file per rank."
            )
        if one.size != other.size:
            raise ArgumentError(
                f"{one.path} is of a run with {one.size} ranks, {other.path} of one with "
                f"{other.size}; remove the older files, or give a run's files by name."
            )


@contextlib.contextmanager
def _fresh(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only once it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(path.name, "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
                    yield cast("IO[bytes]", file)
            else:
                yield raw
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(merge: Merge, path: Path, advance: Advance = _no_advance) -> int:
    """Write one file, packed if its name ends with ``.gz``, and give the number of its events.

    Args:
        merge: What :func:`open_ranks` gave.
        path: Where to write; a file that is there is replaced once the new one is whole.
        advance: Called now and then with a file and the bytes of it that were read.

    Raises:
        ArgumentError: If it is one of the files to read, or cannot be written.
    """
    if path.resolve() in {file.path.resolve() for file in merge.files}:
        raise ArgumentError(f"{path} is one of the files to merge; write to another one.")
    events = 0
    try:
        with _fresh(path) as file:
            for event in merge.events(advance):
                file.write((b",\n" if events else b"[\n") + _encode(event).encode())
                events += 1
            file.write(b"\n]\n")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error}.") from error
    return events
