"""Spans of a merged timeline, collected by rank and kind for reports.

A span takes 16 bytes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from asyncddp.timeline.report.intervals import Intervals, union
from asyncddp.timeline.trace_files import JsonEvent
from asyncddp.timeline.tracks import MIXING

COMPUTE = ("forward", "backward", "optimizer")
BLOCKING = ("enqueue", "mix", "wait", "window")  # by a thread that calls verbs
NOBODY = -1  # in place of a rank: no rank was late, or it is unknown which


def _no_times() -> array[float]:
    return array("d")


class RankSpans:
    """Begin and end times in µs of one rank's spans by kind, in flat arrays, on rank 0's clock."""

    def __init__(self) -> None:
        self.steps = _no_times()
        self.kinds = defaultdict[str, "array[float]"](_no_times)
        """A caller's mix is "mix", one of the progress thread is "mixing"."""
        self.waits = defaultdict[tuple[str, str, tuple[int, ...]], "array[float]"](_no_times)
        """The callers' waits by operation, name and the ranks waited for."""
        self.calls = defaultdict[tuple[str, str], "array[float]"](_no_times)
        """Begin of each call, by operation and name."""
        self.sent, self.received = _no_times(), _no_times()
        """Time and bytes of each message."""
        self.called = set[str]()
        """The operations that were called with a tensor."""
        self.moved = set[str]()
        """Those of them whose messages are in the trace."""
        self.first, self.last = float("inf"), float("-inf")

    def sorted_steps(self) -> NDArray[np.float64]:
        """Return begin and end of each step, in order."""
        steps = as_rows(self.steps)
        return steps[np.argsort(steps[:, 0], kind="stable")]

    def intervals(self, *kinds: str) -> Intervals:
        """Return the times covered by at least one span of the given kinds."""
        return union(*(as_rows(self.kinds[kind]) for kind in kinds if kind in self.kinds), ())

    def call_times(self, verb: str, name: str) -> NDArray[np.float64]:
        """Return the begin times of the calls of one operation and name, in order."""
        return np.sort(np.array(self.calls.get((verb, name), ()), dtype=np.float64))


class TimelineSpans:
    """Spans of all ranks, read from a merged timeline, and metadata of the run."""

    def __init__(self) -> None:
        self.ranks = defaultdict[int, RankSpans](RankSpans)
        self.size = 0
        self.missing: list[int] = []
        """Ranks without a file."""
        self.arrows = _no_times()
        """Time and rank of each message's departure and arrival, flat."""
        self.collectives = set[str]()
        """The operations in which all ranks take part."""

    def waits_of(self, rank: int) -> dict[int, NDArray[np.float64]]:
        """Return a rank's waits, grouped by the rank that arrived last."""
        spans = self.ranks[rank]
        found: defaultdict[int, list[NDArray[np.float64]]] = defaultdict(list)
        for (verb, name, peers), flat in spans.waits.items():
            rows = as_rows(flat)
            whom = [peers[-1] if peers else NOBODY] * len(rows)
            if len(peers) > 1 and verb in self.collectives:
                others = {p: self.ranks[p].call_times(verb, name) for p in peers if p in self.ranks}
                known = len(others) == len(peers)
                mine = spans.call_times(verb, name)
                whom = _find_last_callers(mine, others, rows) if known else [NOBODY] * len(rows)
            for one in set(whom):
                found[one].append(rows[np.array(whom) == one])
        return {one: np.concatenate(parts) for one, parts in found.items()}


def _find_last_callers(
    mine: NDArray[np.float64], others: dict[int, NDArray[np.float64]], waits: NDArray[np.float64]
) -> list[int]:
    """Find, for each of a rank's waits in a collective, the rank that it waited for.

    The k-th call of a name on one rank is the k-th of that name on every other: the wait was for
    the rank that called last, or for ``NOBODY`` if all had called before it began, or if the call
    of one of them is in no file.
    """
    ranks = list(others)
    k = np.searchsorted(mine, waits[:, 1], side="right") - 1
    came = np.full((len(ranks), len(waits)), np.nan)
    for row, rank in enumerate(ranks):
        known = (k >= 0) & (k < len(others[rank]))
        came[row, known] = others[rank][k[known]]
    certain = ~np.isnan(came).any(axis=0)
    last = np.where(np.isnan(came), -np.inf, came).argmax(axis=0)
    late = certain & (came[last, np.arange(len(waits))] > waits[:, 0])
    return [ranks[row] if is_late else NOBODY for row, is_late in zip(last, late, strict=True)]


def as_rows(flat: array[float], columns: int = 2) -> NDArray[np.float64]:
    """Reshape a flat array to rows."""
    return np.array(flat, dtype=np.float64).reshape(-1, columns)


def collect_spans(events: Iterable[JsonEvent]) -> TimelineSpans:
    """Collect the spans from the events of a merged timeline."""
    timeline = TimelineSpans()
    departure: JsonEvent = {"id": None}
    for event in events:
        phase = event["ph"]
        if phase == "X":
            _add_span(timeline, event)
        elif phase == "s":
            departure = event
        elif phase == "f" and departure["id"] == event["id"]:
            ends = (departure["ts"], departure["pid"], event["ts"], event["pid"])
            timeline.arrows.extend(ends)
        elif event.get("name") == "asyncddp.merged":
            args = event["args"]
            timeline.size, timeline.missing = args["size"], args["missing"]
        elif event.get("name") == "asyncddp.rank":
            _ = timeline.ranks[event["pid"]]  # creates the rank's entry, even if it did nothing
    return timeline


def _add_span(timeline: TimelineSpans, event: JsonEvent) -> None:
    """Add one span; unknown categories are ignored."""
    spans = timeline.ranks[event["pid"]]
    begin, end = event["ts"], event["ts"] + event["dur"]
    spans.first, spans.last = min(spans.first, begin), max(spans.last, end)
    kind, args = event.get("cat"), event.get("args", {})
    verb, name = args.get("verb", ""), args.get("name", "")
    if kind == "step":
        spans.steps.extend((begin, end))
    elif kind in (*COMPUTE, "collective", "transfer"):
        spans.kinds[kind].extend((begin, end))
        if kind == "collective":
            timeline.collectives.add(verb)
        elif kind == "transfer":
            spans.moved.add(verb)
            flat = spans.sent if event["name"] == "send" else spans.received
            flat.extend((begin, args["bytes"]) if "bytes" in args else ())
    elif kind in BLOCKING and event["tid"] != MIXING:
        spans.kinds[kind].extend((begin, end))
        if kind == "wait":
            spans.waits[verb, name, tuple(args.get("for", ()))].extend((begin, end))
    elif kind == "mix":
        spans.kinds["mixing"].extend((begin, end))
    if kind == "enqueue":
        spans.calls[verb, name].append(begin)
        spans.called.update([verb] if args.get("bytes") else ())
