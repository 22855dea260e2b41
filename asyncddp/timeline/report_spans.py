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
from asyncddp.timeline.report_waits import NOBODY, Calls, Waits, who_came_last

__all__ = ["BACKGROUND", "BLOCKING", "COMPUTE", "RankSpans", "Recording", "record"]

COMPUTE = ("forward", "backward", "optimizer")
BLOCKING = ("enqueue", "mix", "wait", "window")  # by a thread that calls verbs
BACKGROUND = ("collective", "mixing", "transfer")
_MIXING = 3  # the track of the thread that mixes while others compute


@dataclass
class RankSpans:
    """The spans of one rank, in µs on rank 0's clock.

    Attributes:
        steps: Begin and end of each step, flat.
        kinds: The same of forward, backward, optimizer; of enqueue, wait, mix, window where the
            callers themselves did it; of transfer, collective, and of "mixing" by another thread.
        waits: The caller's waits.
        calls: When it called which verb.
        sent: Time and bytes of each message, flat.
        received: The same of what came.
        verbs: The verbs that were called with a tensor.
        moved: Those of them whose messages are in the trace.
        first: When the rank's first span began.
        last: When its last span ended.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    kinds: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    waits: Waits = field(default_factory=Waits)
    calls: Calls = field(default_factory=Calls)
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
        collectives: The verbs in which all ranks take part.
    """

    ranks: dict[int, RankSpans] = field(default_factory=lambda: defaultdict(RankSpans))
    size: int = 0
    missing: list[int] = field(default_factory=list)
    clock_error: float | None = None
    arrows: array[float] = field(default_factory=lambda: array("d"))
    collectives: set[str] = field(default_factory=set)

    def waits_of(self, rank: int) -> dict[int, NDArray[np.float64]]:
        """A rank's waits, by the rank that came last."""
        spans = self.ranks[rank]
        found = {whom: [pairs(flat)] for whom, flat in spans.waits.single.items()}
        for (verb, name, peers), flat in spans.waits.joint.items():
            rows = pairs(flat)
            whom = [peers[-1]] * len(rows)
            if verb in self.collectives:
                others = {p: self.ranks[p].calls.of(verb, name) for p in peers if p in self.ranks}
                known = len(others) == len(peers)
                mine = spans.calls.of(verb, name)
                whom = who_came_last(mine, others, rows) if known else [NOBODY] * len(rows)
            for one in set(whom):
                found.setdefault(one, []).append(rows[np.array(whom) == one])
        return {one: np.concatenate(parts) for one, parts in found.items()}


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
    elif kind in COMPUTE:
        spans.kinds[kind].extend((begin, end))
    elif kind == "collective":
        spans.kinds[kind].extend((begin, end))
        recording.collectives.add(args["verb"])
    elif kind == "transfer":
        spans.kinds[kind].extend((begin, end))
        _take_bytes(spans, event, args)
    elif kind in BLOCKING:
        _take_call(spans, event, args, begin, end)


def _take_call(
    spans: RankSpans, event: Event, args: dict[str, Any], begin: float, end: float
) -> None:
    """What the caller did for communication, and what another thread mixed."""
    kind, verb, name = event["cat"], args.get("verb", ""), args.get("name", "")
    if kind == "enqueue":
        spans.calls.add(verb, name, begin)
        if args.get("bytes"):
            spans.verbs.add(verb)
    if event["tid"] != _MIXING:
        spans.kinds[kind].extend((begin, end))
        if kind == "wait":
            spans.waits.add(verb, name, args.get("for", ()), begin, end)
    elif kind == "mix":
        spans.kinds["mixing"].extend((begin, end))


def _take_bytes(spans: RankSpans, event: Event, args: dict[str, Any]) -> None:
    """Bytes that were sent, received, or read where the peer keeps them."""
    if "verb" in args:
        spans.moved.add(args["verb"])
    if "bytes" in args:
        flat = spans.sent if event["name"] == "send" else spans.received
        flat.extend((event["ts"], args["bytes"]))
