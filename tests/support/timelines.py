"""The laws that a rank's timeline keeps, whoever wrote it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["arrows", "assert_balanced", "assert_nested", "read", "spans"]

Event = dict[str, Any]


def read(path: Path, *, ended: bool = True) -> list[Event]:
    """All events of a file, which is strict JSON where its rank has ended."""
    text = path.read_text(encoding="utf-8")
    if ended:
        events: list[Event] = json.loads(text)
        return events
    lines = text.splitlines()
    assert lines[0] == "["
    return [json.loads(line.removesuffix(",")) for line in lines[1:] if line.endswith(("},", "}"))]


def spans(events: list[Event], cat: str, name: str | None = None) -> list[Event]:
    """The spans of a category."""
    return [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] == cat and name in (None, event["name"])
    ]


def assert_nested(events: list[Event]) -> None:
    """Spans of a track lie inside each other, or one after the other."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0.0, event
            begin = round(event["ts"] * 1000)
            tracks[event["tid"]].append((begin, -begin - round(event["dur"] * 1000), event))
    for track in tracks.values():
        outer: list[int] = []
        for begin, end, event in sorted(track, key=lambda one: one[:2]):
            while outer and outer[-1] <= begin:
                outer.pop()
            assert not outer or -end <= outer[-1] + 2, event  # two roundings
            outer.append(-end)


def assert_balanced(events: list[Event]) -> None:
    """Activities begin and end equally often on each track, and none ends before it begins."""
    depth: dict[int, int] = defaultdict(int)
    for event in events:
        depth[event["tid"]] += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert depth[event["tid"]] >= 0, event
    assert set(depth.values()) <= {0}, depth


def arrows(events: list[Event], end: str) -> dict[str, Event]:
    """By the name of each message, the span in which it begins (``"s"``) or ends (``"f"``)."""
    found: dict[str, Event] = {}
    by_track = defaultdict(list)
    for event in spans(events, "transfer"):
        by_track[event["tid"]].append(event)
    for event in events:
        if event["ph"] == end:
            assert event["id"] not in found, event
            at = event["ts"]
            inside = [
                span
                for span in by_track[event["tid"]]
                if span["ts"] - 0.002 <= at <= span["ts"] + span["dur"] + 0.002
                and (span["name"] == "send") == (end == "s")
            ]
            assert inside, event
            found[event["id"]] = inside[-1 if end == "s" else 0]
    return found
