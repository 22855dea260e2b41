"""Types of trace events, and a formatter that turns them into lines of a Chrome trace.

An event is recorded as a tuple, which is cheap; the writer thread formats it.

Source: the Trace Event Format of Chromium's ``about:tracing``, which Perfetto reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from asyncddp.timeline.tracks import TRANSFER_TRACK, TRANSFERS, TransferTrackAllocator

Args: TypeAlias = Mapping[str, Any] | None
_encode = msgspec.json.Encoder().encode


class Span(NamedTuple):
    """Trace event with a begin and an end in ns, and a category ``cat``."""

    cat: str
    name: str
    track: int  # the row on which it is shown; TRANSFER_TRACK for a transfer
    begin: int
    end: int
    args: Args = None
    arrow: str = ""  # "s" where a message begins, "f" where it ends
    message: str = ""  # identifier of the message, equal at both ends of the arrow


class SingleTimestampEvent(NamedTuple):
    """Trace event with one time stamp: the begin or end of an activity, or metadata."""

    phase: str  # "B", "E" or "M"
    name: str
    track: int
    time: int | None  # in ns; None for metadata that hold at all times
    args: Args = None


TraceEvent: TypeAlias = Span | SingleTimestampEvent


def track_title(track: int, title: str) -> tuple[SingleTimestampEvent, SingleTimestampEvent]:
    """Return the metadata events that give a track its title and position."""
    return (
        SingleTimestampEvent("M", "thread_name", track, None, {"name": title}),
        SingleTimestampEvent("M", "thread_sort_index", track, None, {"sort_index": track}),
    )


class ChromeTraceFormatter:
    """Formatter of one rank's trace events as lines of a Chrome trace (JSON)."""

    def __init__(self, rank: int) -> None:
        self._rank, self._tracks = rank, TransferTrackAllocator()
        self._next_track = TRANSFERS

    def format(self, event: TraceEvent) -> list[bytes]:
        """Format an event as lines without separators."""
        found = self._span(event) if isinstance(event, Span) else [self._point(event)]
        return [_encode(one) for one in found]

    def _span(self, span: Span) -> list[dict[str, Any]]:
        cat, name, track, begin, end, args, arrow, message = span
        found = []
        if track == TRANSFER_TRACK:
            track = self._tracks.allocate(begin, end)
            if track >= self._next_track:
                self._next_track = track + 1
                found = [*map(self._point, track_title(track, f"transfer {track - TRANSFERS}"))]
        times = {"ts": round(begin / 1e3, 3), "dur": round((end - begin) / 1e3, 3)}
        where = {"pid": self._rank, "tid": track}
        shown = {"name": name, "cat": cat, "ph": "X", **times, **where}
        found.append(shown if args is None else {**shown, "args": args})
        if arrow:
            bound = {"bp": "e"} if arrow == "f" else {}
            at = round((end if bound else begin) / 1e3, 3)
            facts = {"name": "message", "cat": "message", "ph": arrow, "id": message, "ts": at}
            found.append({**facts, **where, **bound})
        return found

    def _point(self, event: SingleTimestampEvent) -> dict[str, Any]:
        phase, name, track, time, args = event
        found = {"name": name, "ph": phase, "pid": self._rank, "tid": track}
        if phase in "BE":
            found["cat"] = "activity"
        if time is not None:
            found["ts"] = round(time / 1e3, 3)
        return found if args is None else {**found, "args": args}
