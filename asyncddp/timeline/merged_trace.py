"""Merging of all ranks' trace files into one trace on rank 0's clock, for Perfetto.

Each rank has measured now and then how far rank 0's clock is ahead of its own. Between two
measurements the offset is interpolated, so that a constant drift causes no error. Events are
streamed: of each file one line is in memory, and of each arrow the end that came first.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec

from asyncddp.errors import ArgumentError
from asyncddp.timeline.trace_files import (
    JsonEvent,
    ProgressCallback,
    RankTraceInfo,
    find_trace_files,
    no_progress,
    read_events,
    scan_trace,
)
from asyncddp.whole_files import written_whole

_WORST_DRIFT = 1e-4  # of two quartz clocks, where there is one measurement only


class ClockAlignment:
    """Conversion of a rank's time stamps to rank 0's clock, by a piecewise linear offset.

    ``points`` are ``(ts, offset, error)`` in µs, sorted. ``drifts`` is False where the rank shares
    the clock of rank 0's machine, ``measured`` where the points are only a guess.
    """

    def __init__(
        self,
        points: Sequence[tuple[float, float, float]],
        *,
        drifts: bool = True,
        measured: bool = True,
    ) -> None:
        self._times = [ts for ts, _, _ in points]
        self._offsets = [offset for _, offset, _ in points]
        self._errors = [error for _, _, error in points]
        self._drifts, self.measured = drifts, measured

    def __call__(self, ts: float) -> float:
        """Convert a time of the rank to rank 0's clock."""
        times, offsets = self._times, self._offsets
        k = bisect_right(times, ts)
        if k in (0, len(times)):
            return ts + offsets[min(k, len(times) - 1)]
        share = (ts - times[k - 1]) / (times[k] - times[k - 1])
        return ts + offsets[k - 1] + share * (offsets[k] - offsets[k - 1])

    def drift(self) -> float:
        """Estimate the relative drift of the two clocks: 1e-6 is one µs per second."""
        if not self._drifts:
            return 0.0
        if self._times[-1] == self._times[0]:
            return _WORST_DRIFT
        return abs(self._offsets[-1] - self._offsets[0]) / (self._times[-1] - self._times[0])

    @property
    def drifting(self) -> bool:
        """True if the drift exceeds the measurement errors."""
        moved = abs(self._offsets[-1] - self._offsets[0])
        return self.measured and moved > self._errors[-1] + self._errors[0]

    def error(self, first: float, last: float) -> float | None:
        """Bound the error in µs between two times, including drift outside the measurements."""
        if not self.measured:
            return None
        outside = max(self._times[0] - first, last - self._times[-1], 0.0)
        return max(self._errors) + self.drift() * outside


def align_clocks(files: Sequence[RankTraceInfo]) -> dict[int, ClockAlignment]:
    """Determine the clock alignment of every rank.

    Ranks on one machine share a clock, which is exact where their measurements agree with that. A
    rank of another machine without measurements is aligned by wall clocks, whose error is unknown.
    """
    base = min(files, key=lambda file: file.rank)
    own: dict[str, Sequence[tuple[float, float, float]]] = {base.host: [(0.0, 0.0, 0.0)]}
    own.update({file.host: file.clocks for file in files if file.clocks})

    def clock_of(file: RankTraceInfo) -> ClockAlignment:
        points = file.clocks or own.get(file.host)
        here = file.host == base.host and not base.rank
        if here and all(abs(offset) <= error for _, offset, error in file.clocks):
            points = [(file.start, 0.0, 0.0)]
        if points:
            return ClockAlignment(points, drifts=file.host != base.host)
        ahead = 1e6 * (file.started - base.started) - (file.first - base.first)
        offset = ClockAlignment(own[base.host])(base.first) - base.first + ahead
        return ClockAlignment([(file.first, offset, 0.0)], measured=False)

    return {file.rank: clock_of(file) for file in files}


class FlowArrowMatcher:
    """Matcher of sends with receives in all ranks' traces, which draws messages as arrows.

    Perfetto drops arrows whose ids are not numbers. The first end of an arrow is held until the
    second is found; of more than ``held`` ends the oldest is dropped. ``kept`` counts the
    arrows with both ends.
    """

    def __init__(self, held: int = 100_000) -> None:
        self.kept, self._given_up, self._held = 0, 0, held
        self._waiting: dict[tuple[str, str], JsonEvent] = {}

    @property
    def dropped(self) -> int:
        """Number of arrow ends whose other end is missing from the files."""
        return self._given_up + len(self._waiting)

    def matched(self, events: Iterable[JsonEvent]) -> Iterator[JsonEvent]:
        """Yield the events, without arrows that have only one end."""
        for event in events:
            if event["ph"] not in ("s", "f"):
                yield event
                continue
            name, is_end = str(event.get("id")), event["ph"] == "f"
            other = self._waiting.pop((name, "s" if is_end else "f"), None)
            if other is not None:
                self.kept += 1
                for end in (other, event) if is_end else (event, other):
                    yield {**end, "id": self.kept}
                continue
            self._given_up += (name, event["ph"]) in self._waiting
            self._waiting[name, event["ph"]] = event
            if len(self._waiting) > self._held:
                del self._waiting[next(iter(self._waiting))]
                self._given_up += 1


@dataclass(frozen=True)
class MergedTrace:
    """Trace files of all ranks of a run, read as one stream of events."""

    files: tuple[RankTraceInfo, ...]  # in order of rank
    size: int
    silent: tuple[Path, ...]  # files that are empty
    clocks: dict[int, ClockAlignment]
    origin: float  # time on rank 0's clock that becomes 0, in µs; viewers drop what is negative
    arrows: FlowArrowMatcher

    @property
    def missing(self) -> list[int]:
        """Ranks without events."""
        return sorted(set(range(self.size)) - {file.rank for file in self.files})

    @property
    def unmeasured(self) -> list[int]:
        """Ranks whose clocks are aligned by wall-clock time only."""
        return [rank for rank, clock in self.clocks.items() if not clock.measured]

    @property
    def clock_error(self) -> float | None:
        """Largest clock error of any rank in µs; None if any is unknown."""
        errors = [self.clocks[file.rank].error(file.first, file.last) for file in self.files]
        known = [error for error in errors if error is not None]
        return max(known) if len(known) == len(errors) else None

    @property
    def drift(self) -> float:
        """Largest clock drift that exceeds the measurement errors, as a fraction."""
        return max((clock.drift() for clock in self.clocks.values() if clock.drifting), default=0.0)

    def events(self, advance: ProgressCallback = no_progress) -> Iterator[JsonEvent]:
        """Yield all events on rank 0's clock, approximately in order of time."""
        ranks = [file.rank for file in self.files]
        clock = {"clock_error": self.clock_error, "clock_unmeasured": self.unmeasured}
        facts = {"size": self.size, "ranks": ranks, "missing": self.missing, **clock}
        yield _metadata("asyncddp.merged", version=1, **facts)
        streams = (self._aligned_events(file, advance) for file in self.files)
        merged = heapq.merge(*streams, key=lambda pair: pair[0])
        yield from self.arrows.matched(event for _, event in merged)
        yield _metadata("asyncddp.arrows", kept=self.arrows.kept, dropped=self.arrows.dropped)

    def _aligned_events(
        self, file: RankTraceInfo, advance: ProgressCallback
    ) -> Iterator[tuple[float, JsonEvent]]:
        """Yield a rank's events on rank 0's clock, each with its end time."""
        clock, origin, end = self.clocks[file.rank], self.origin, 0.0
        for event in read_events(file.path, advance):
            if event.get("name") == "asyncddp.clock":
                continue
            if "ts" in event:
                begin = event["ts"]
                event["ts"] = end = round(clock(begin) - origin, 3)
                if "dur" in event:  # from the rounded end: spans that end together still do
                    end = round(clock(begin + event["dur"]) - origin, 3)
                    event["dur"] = round(end - event["ts"], 3)
            yield end, event


def _metadata(name: str, **args: object) -> JsonEvent:
    return {"name": name, "ph": "M", "pid": 0, "tid": 0, "args": args}


def open_traces(
    sources: Iterable[str | Path], advance: ProgressCallback = no_progress
) -> MergedTrace:
    """Read the metadata of a run's trace files, and check that they are of one run."""
    paths = find_trace_files(sources)
    if not paths:
        raise ArgumentError("timelines of no rank were given; give a folder, a prefix, or files.")
    scanned = [(path, scan_trace(path, advance)) for path in paths]
    files = sorted((file for _, file in scanned if file is not None), key=lambda f: f.rank)
    silent = tuple(path for path, file in scanned if file is None)
    if not files:
        raise ArgumentError(
            f"{', '.join(map(str, silent))}: empty; the run was ended before it wrote an event. "
            "Run it again."
        )
    _check_together(files)
    clocks = align_clocks(files)
    starts = [clocks[file.rank](file.first) for file in files]
    origin = min(clocks[files[0].rank](files[0].start), *starts)
    return MergedTrace(tuple(files), files[0].size, silent, clocks, origin, FlowArrowMatcher())


def _check_together(files: Sequence[RankTraceInfo]) -> None:
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
def _open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it is complete."""
    with written_whole(path) as part, part.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(path.name, "wb", compresslevel=5, fileobj=raw, mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            yield raw


def write_merged_trace(
    merge: MergedTrace, path: Path, advance: ProgressCallback = no_progress
) -> int:
    """Write the merged file, gzipped if named ``*.gz``, and return the number of events."""
    if path.resolve() in {file.path.resolve() for file in merge.files}:
        raise ArgumentError(f"{path} is one of the files to merge; write to another one.")
    events = 0
    try:
        with _open_atomically(path) as file:
            for event in merge.events(advance):
                file.write((b",\n" if events else b"[\n") + msgspec.json.encode(event))
                events += 1
            file.write(b"\n]\n")
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error}.") from error
    return events
