"""Window that records its puts, gets and updates in the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from asyncddp.timeline.tracer import Tracer
from asyncddp.windows.edge import RefCountedBuffer, Snapshot
from asyncddp.windows.nonblocking_handle import WindowHandle
from asyncddp.windows.staging import UndeliveredVersion
from asyncddp.windows.window import Window


class TracedWindow(Window):
    """Window that records its sends and reads in the timeline.

    A message has the number of the version that its writer published; what a later version has
    replaced before it was read has no end.

    Args:
        tracer: Records the events.
        *args: As of every window.
        **kwargs: As of every window.
    """

    def __init__(self, tracer: Tracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._nbytes = self.tensor.nbytes
        self._read: dict[int, int] = {}

    def _message_id(self, version: int) -> str:
        """Return the id of a message, distinct from those of other windows of the name."""
        return f"w{self.number}.{version}"

    def _record_span(self, verb: str, begun: int, peers: Iterable[int], **facts: Any) -> int:
        now, name = time.monotonic_ns(), verb.upper()
        args = {"name": self.name, "bytes": self._nbytes, "peers": list(peers), **facts}
        bluefog = {"op": f"MPI_{name}", "call": f"ENQUEUE_{name}"}  # what its scripts look for
        self._tracer.record_span("window", name, begun, now, {**args, **bluefog})
        return now

    def put(
        self,
        tensor: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        add: bool,
        with_p: bool,
        step: int | None = None,
    ) -> WindowHandle:
        """Publish a tensor to neighbours, then scale it."""
        verb, begun = "win_accumulate" if add else "win_put", time.monotonic_ns()
        with self._tracer.profiler_range(verb.upper()):
            handle = super().put(tensor, self_weight, weights, add=add, with_p=with_p, step=step)
        self._record_span(verb, begun, weights)
        return handle

    def _sent(
        self,
        buffer: RefCountedBuffer,
        weights: Mapping[int, float],
        clock: int,
        p: float,
        *,
        add: bool,
    ) -> list[UndeliveredVersion]:
        begun, verb = time.monotonic_ns(), "win_accumulate" if add else "win_put"
        versions = super()._sent(buffer, weights, clock, p, add=add)
        now = time.monotonic_ns()
        for peer in weights:
            edge = self.edges.outgoing.get(peer)
            if edge is not None:
                number = self._message_id(edge.published)
                facts = verb, self.name, peer, self._nbytes
                self._tracer.record_transfer("send", *facts, begun, now, number)
        return versions

    def store_get_result(self, source: int, snapshot: Snapshot, weight: float) -> None:
        """Replace the value of a neighbour's buffer by a tensor that was got."""
        begun = time.monotonic_ns()
        super().store_get_result(source, snapshot, weight)
        self._record_span("win_get", begun, [source])
        self._read[source] = self._buffers.last_read(source)

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool,
        clone: bool,
        with_p: bool,
    ) -> torch.Tensor:
        """Form the weighted sum over buffers."""
        begun = time.monotonic_ns()
        with self._tracer.profiler_range("WIN_UPDATE"):
            result = super().update(self_weight, weights, reset=reset, clone=clone, with_p=with_p)
        old = self.staleness()
        behind = {str(source): old[source].steps for source in weights}
        now = self._record_span("win_update", begun, weights, staleness=behind)
        for source in weights:
            version = self._buffers.last_read(source)
            if version > self._read.get(source, 0):
                self._read[source] = version
                facts = "win_update", self.name, source, self._nbytes
                number = self._message_id(version)
                self._tracer.record_transfer("read", *facts, begun, now, number)
        return result
