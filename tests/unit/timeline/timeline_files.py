"""Ranks' timelines written by hand, from true times, as their own clocks would have seen them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

VERB = "neighbor_allreduce"


@dataclass
class Rank:
    """What one rank would have written; all times given are true ones, in µs."""

    rank: int
    size: int = 1
    host: str = "here"
    ahead: float = 0.0  # its clock less rank 0's at time 0
    drift: float = 0.0  # by which its clock is too fast
    started_unix: float = 1000.0
    events: list[dict] = field(default_factory=list)

    def __post_init__(self):
        identity = {
            "rank": self.rank,
            "size": self.size,
            "host": self.host,
            "version": 1,
            "library": "0.1.0",
            "started_unix": self.started_unix,
        }
        self._metadata("process_name", {"name": f"rank {self.rank} on {self.host}"})
        self._metadata("asyncddp.rank", identity)

    def _metadata(self, name, args, **more):
        event = {"name": name, "ph": "M", "pid": self.rank, "tid": 0, "args": args, **more}
        self.events.append(event)

    def local(self, true):
        return round(true * (1 + self.drift) + self.ahead, 3)

    def clock(self, true, error=1.0):
        """A measurement against rank 0's clock, whose clock is the true one."""
        args = {"offset": true - self.local(true), "error": error}
        self._metadata("asyncddp.clock", args, ts=self.local(true))
        return self

    def span(self, cat, begin, end, tid=1, called=None, **args):
        begin, end = self.local(begin), self.local(end)
        event = {
            "name": called or cat,
            "cat": cat,
            "ph": "X",
            "ts": begin,
            "dur": round(end - begin, 3),
        }
        self.events.append({**event, "pid": self.rank, "tid": tid, "args": args})
        return self

    def wait(self, begin, end, *whom):
        args = {"verb": VERB, "name": "x"} | ({"for": list(whom)} if whom else {})
        return self.span("wait", begin, end, 2, **args)

    def transfer(self, name, begin, end, peer, nbytes):
        args = {"verb": VERB, "name": "x", "peer": peer, "bytes": nbytes}
        return self.span("transfer", begin, end, 100, name, **args)

    def arrow(self, phase, time, message):
        event = {"name": "message", "cat": "message", "ph": phase, "id": message}
        bound = {"bp": "e"} if phase == "f" else {}
        where = {"pid": self.rank, "tid": 100}
        self.events.append({**event, "ts": self.local(time), **where, **bound})
        return self

    def text(self, *, whole=True):
        lines = ",\n".join(map(json.dumps, self.events))
        return f"[\n{lines}\n]\n" if whole else f"[\n{lines},\n"

    def write(self, folder: Path, name=None, *, whole=True) -> Path:
        path = folder / (name or f"rank{self.rank}.json")
        path.write_text(self.text(whole=whole))
        return path


def straggling(size=4, steps=6, compute=1000.0, late=4000.0, nbytes=4000):
    """A ring on which each rank needs its left neighbour's message; the last computes longer."""
    ranks = [Rank(rank, size, ahead=1e6 * rank).clock(0.0) for rank in range(size)]
    begin = [0.0] * size
    for step in range(steps):
        sent = [begin[k] + compute + late * (k == size - 1) for k in range(size)]
        there = [max(sent[k], sent[k - 1]) + 100 for k in range(size)]
        for k, rank in enumerate(ranks):
            before, after = (k - 1) % size, (k + 1) % size
            middle, end = (begin[k] + sent[k]) / 2, there[k] + 400
            rank.span("forward", begin[k], middle, called="net")
            rank.span("backward", middle, sent[k], called="net")
            rank.transfer("send", sent[k], sent[k] + 50, after, nbytes)
            rank.arrow("s", sent[k], f"{k}>{after}:{step}")
            rank.wait(sent[k], there[k], before)
            rank.transfer("receive", there[k] - 50, there[k], before, nbytes)
            rank.arrow("f", there[k], f"{before}>{k}:{step}")
            rank.span("mix", there[k], there[k] + 200, 2, verb=VERB, bytes=nbytes, peers=2)
            rank.span("optimizer", there[k] + 200, there[k] + 300)
            rank.span("step", begin[k], end, step=step)
            begin[k] = end
    return [rank.clock(max(begin)) for rank in ranks]
