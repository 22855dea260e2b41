"""Types of trace events, and the formatter that writes them as lines of a Chrome trace.

An event is recorded as a tuple, which is cheap; the writer thread formats it.

Source: the Trace Event Format of Chromium's ``about:tracing``, which Perfetto reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from asyncddp.timeline.tracks import TRANSFER_TRACK, TRANSFERS, TransferTrackAllocator

Args: TypeAlias = Mapping[str, Any] | None


class Span(NamedTuple):
    """Trace event with begin and end times in ns, and a category ``cat``."""

    cat: str
    name: str
    track: int  # the row on which it is shown; TRANSFER_TRACK for a transfer
    begin: int
    end: int
    args: Args = None
    arrow: str = ""  # "s" where a message begins, "f" where it ends
    message: str = ""  # identifier of the message, equal at both ends of the arrow


class SingleTimestampEvent(NamedTuple):
    """Trace event with one time stamp: begin or end of an activity, or metadata."""

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


_text = lru_cache(4096)(json.dumps)


def _object(args: Mapping[str, Any]) -> str:
    """Format a JSON object; faster than ``json.dumps`` for the values used here."""
    return "{" + ", ".join([f'"{key}": {_value(value)}' for key, value in args.items()]) + "}"


def _value(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _text(value)
    return str(value) if kind is int else json.dumps(value)


class ChromeTraceFormatter:
    """Formatter of one rank's trace events as lines of a Chrome trace (JSON)."""

    def __init__(self, rank: int) -> None:
        self._rank, self._tracks = rank, TransferTrackAllocator()
        self._next_track = TRANSFERS

    def format(self, event: TraceEvent) -> list[str]:
        """Format an event as lines without separators."""
        return self._span(event) if isinstance(event, Span) else [self._point(event)]

    def _span(self, span: Span) -> list[str]:
        cat, name, track, begin, end, args, arrow, message = span
        lines = []
        if track == TRANSFER_TRACK:
            track = self._tracks.allocate(begin, end)
            if track >= self._next_track:
                self._next_track = track + 1
                lines = [
                    self._point(event)
                    for event in track_title(track, f"transfer {track - TRANSFERS}")
                ]
        where = f'"pid": {self._rank}, "tid": {track}'
        more = "" if args is None else f', "args": {_object(args)}'
        lines.append(
            f'{{"name": {_text(name)}, "cat": "{cat}", "ph": "X", "ts": {begin / 1e3:.3f}, '
            f'"dur": {(end - begin) / 1e3:.3f}, {where}{more}}}'
        )
        if arrow:
            bound, at = (', "bp": "e"', end) if arrow == "f" else ("", begin)
            lines.append(
                f'{{"name": "message", "cat": "message", "ph": "{arrow}", "id": {_text(message)}, '
                f'"ts": {at / 1e3:.3f}, {where}{bound}}}'
            )
        return lines

    def _point(self, event: SingleTimestampEvent) -> str:
        phase, name, track, time, args = event
        cat = '"cat": "activity", ' if phase in "BE" else ""
        when = "" if time is None else f'"ts": {time / 1e3:.3f}, '
        more = "" if args is None else f', "args": {json.dumps(args)}'
        return (
            f'{{"name": {_text(name)}, {cat}"ph": "{phase}", {when}'
            f'"pid": {self._rank}, "tid": {track}{more}}}'
        )
