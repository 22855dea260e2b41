"""Notes as they are taken, and as lines of a Chrome trace.

A note is a tuple that is quickly made; the thread that writes makes a line of it. Times are those
of :func:`time.monotonic_ns`.

Source: the Trace Event Format of Chromium's ``about:tracing``, which Perfetto reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from asyncddp.timeline.tracks import LANE, TRANSFERS, Lanes

__all__ = ["Lines", "Mark", "Note", "Span"]

Args: TypeAlias = Mapping[str, Any] | None


class Span(NamedTuple):
    """Something that lasted.

    Attributes:
        cat, name: What it was.
        track: Where it is shown; ``LANE`` for a transfer.
        begin, end: Nanoseconds.
        args: Further facts.
        arrow: ``"s"`` where a message begins, ``"f"`` where it ends; empty for none.
        message: What both ends of the arrow call it.
    """

    cat: str
    name: str
    track: int
    begin: int
    end: int
    args: Args = None
    arrow: str = ""
    message: str = ""


class Mark(NamedTuple):
    """Anything else: the begin or the end of an activity, or metadata.

    Attributes:
        phase: ``"B"``, ``"E"`` or ``"M"``.
        name: Of the activity, or of the metadata.
        track: Where it is shown.
        time: Nanoseconds; None for what holds at all times.
        args: Further facts.
    """

    phase: str
    name: str
    track: int
    time: int | None
    args: Args = None


Note: TypeAlias = Span | Mark

_text = lru_cache(4096)(json.dumps)


def _object(args: Mapping[str, Any]) -> str:
    """A JSON object; quicker than ``json.dumps``, for the kinds of values that there are."""
    return "{" + ", ".join([f'"{key}": {_value(value)}' for key, value in args.items()]) + "}"


def _value(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _text(value)
    return str(value) if kind is int else json.dumps(value)


class Lines:
    """Makes lines of notes.

    Args:
        rank: Whose.

    Example:
        >>> print(*Lines(3).of(Span("mix", "mix", 2, 1_000, 3_500, {"bytes": 8})))
        {"name": "mix", "cat": "mix", "ph": "X", "ts": 1.000, "dur": 2.500, "pid": 3, "tid": 2, "args": {"bytes": 8}}
    """  # noqa: E501 - a line of the file is as long as it is

    def __init__(self, rank: int) -> None:
        self._rank, self._lanes = rank, Lanes()
        self._known = TRANSFERS

    def of(self, note: Note) -> list[str]:
        """The lines of a note, without what stands between two."""
        return self._span(note) if isinstance(note, Span) else [self._mark(note)]

    def _span(self, span: Span) -> list[str]:
        cat, name, track, begin, end, args, arrow, message = span
        lines = []
        if track == LANE:
            track = self._lanes.place(begin, end)
            if track >= self._known:
                self._known = track + 1
                lines = self.title(track, f"transfer {track - TRANSFERS}")
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

    def _mark(self, mark: Mark) -> str:
        phase, name, track, time, args = mark
        cat = '"cat": "activity", ' if phase in "BE" else ""
        when = "" if time is None else f'"ts": {time / 1e3:.3f}, '
        more = "" if args is None else f', "args": {json.dumps(args)}'
        return (
            f'{{"name": {_text(name)}, {cat}"ph": "{phase}", {when}'
            f'"pid": {self._rank}, "tid": {track}{more}}}'
        )

    def title(self, track: int, title: str) -> list[str]:
        """The lines that give a track its title, and its place among the others."""
        return [
            self._mark(Mark("M", "thread_name", track, None, {"name": title})),
            self._mark(Mark("M", "thread_sort_index", track, None, {"sort_index": track})),
        ]
