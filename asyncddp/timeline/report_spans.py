"""What a report needs of a timeline: begins and ends by rank and kind, sixteen bytes a span."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncddp.timeline.reading import Event
from asyncddp.timeline.report_intervals import Intervals, union

__all__ = ["BACKGROUND", "BLOCKING", "COMPUTE", "RankSpans", "Recording", "record"]

COMPUTE = ("forward", "backward", "optimizer")
BLOCKING = ("enqueue", "mix", "wait", "window")  # on the caller's own track of communication
BACKGROUND = ("collective", "mixing", "transfer")
_CALLER = 2


@dataclass
class RankSpans:
    """The spans of one rank, in µs on rank 0's clock.

    Attributes:
        steps: Begin and end of each step, flat.
        kinds: The same of forward, backward, optimizer; of enqueue, wait, mix, window where the
            caller itself did it; of transfer, collective, and of "mixing" by another thread.
        waits: The same of the caller's waits, by the rank that came last; -1 where nobody knows.
        sent: Time and bytes of each message, flat.
        received: The same of what came.
        verbs: The verbs that were called.
        moved: Those of them whose messages are in the trace.
        first: When the rank's first span began.
        last: When its last span ended.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    kinds: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    waits: dict[int, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    sent: array[float] = field(default_factory=lambda: array("d"))
    received: array[float] = field(default_factory=lambda: array("d"))
    verbs: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    first: float = float("inf")
    last: float = float("-inf")

    def moments(self, *kinds: str) -> Intervals:
        """When at least one span of these kinds lasted."""
        return union(*(pairs(self.kinds[kind]) for kind in kinds if kind in self.kinds), ())


@dataclass
class Recording:
    """The spans of all ranks.

    Attributes:
        ranks: By rank.
        size: How many ranks there were.
        missing: Those of which no file was there.
        clock_error: The largest error of their clocks in µs, None if not known.
        arrows: Time and rank of a message's departure and arrival, flat.
    """

    ranks: dict[int, RankSpans] = field(default_factory=lambda: defaultdict(RankSpans))
    size: int = 0
    missing: list[int] = field(default_factory=list)
    clock_error: float | None = None
    arrows: array[float] = field(default_factory=lambda: array("d"))


def pairs(flat: array[float], columns: int = 2) -> NDArray[np.float64]:
    """A flat array as rows."""
    return np.array(flat, dtype=np.float64).reshape(-1, columns)


def record(events: Iterable[Event]) -> Recording:
    """Gather spans from the events of a merged timeline.

    Example:
        >>> span = {"ph": "X", "cat": "forward", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 1}
        >>> record([span]).ranks[0].moments("forward").tolist()
        [[1.0, 3.0]]
    """
    recording = Recording()
    departure: Event | None = None
    for event in events:
        phase = event["ph"]
        if phase == "X":
            _take(recording, event)
        elif phase == "s":
            departure = event
        elif phase == "f" and departure is not None and departure["id"] == event["id"]:
            ends = (departure["ts"], departure["pid"], event["ts"], event["pid"])
            recording.arrows.extend(ends)
        elif event.get("name") == "asyncddp.merged":
            args = event["args"]
            recording.size, recording.missing = args["size"], args["missing"]
            recording.clock_error = args["clock_error"]
        elif event.get("name") == "asyncddp.rank":
            _ = recording.ranks[event["pid"]]  # it was there, even if it did nothing
    return recording


def _take(recording: Recording, event: Event) -> None:
    """One span; categories that nobody knows are let be."""
    spans = recording.ranks[event["pid"]]
    begin, end = event["ts"], event["ts"] + event["dur"]
    spans.first, spans.last = min(spans.first, begin), max(spans.last, end)
    kind, args = event.get("cat"), event.get("args", {})
    if kind == "step":
        spans.steps.extend((begin, end))
    elif kind in COMPUTE or kind == "collective":
        spans.kinds[kind].extend((begin, end))
    elif kind == "transfer":
        spans.kinds[kind].extend((begin, end))
        _take_bytes(spans, event, args)
    elif kind in BLOCKING:
        if "verb" in args:
            spans.verbs.add(args["verb"])
        if event["tid"] == _CALLER:
            spans.kinds[kind].extend((begin, end))
        elif kind == "mix":
            spans.kinds["mixing"].extend((begin, end))
        if kind == "wait" and event["tid"] == _CALLER:
            whom = args.get("for") or [-1]
            spans.waits[whom[-1]].extend((begin, end))


def _take_bytes(spans: RankSpans, event: Event, args: dict[str, Any]) -> None:
    """Bytes that were sent, received, or read where the peer keeps them."""
    if "verb" in args:
        spans.moved.add(args["verb"])
    if "bytes" in args:
        flat = spans.sent if event["name"] == "send" else spans.received
        flat.extend((event["ts"], args["bytes"]))
