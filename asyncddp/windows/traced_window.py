"""Window with tracing: records its puts, gets and updates in the timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from typing_extensions import override

from asyncddp.timeline.tracer import Tracer
from asyncddp.windows.edge import AcquireBuffer, PublishedSnapshot, RefCountedBuffer
from asyncddp.windows.nonblocking_handle import WindowHandle
from asyncddp.windows.staging import UndeliveredMessage
from asyncddp.windows.window import Window
from asyncddp.windows.window_edges import WindowEdges


class TracedWindow(Window):
    """Window that records spans of its operations, and transfers of its tensors, in the timeline.

    A transfer is numbered by its version; if it was replaced before it was read, it has no end.
    """

    def __init__(self, tracer: Tracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._read: dict[int, int] = {}

    def _record_span(self, verb: str, begun: int, peers: Iterable[int], **facts: Any) -> int:
        now, name = time.monotonic_ns(), verb.upper()
        args = {"name": self.name, "bytes": self.tensor.nbytes, "peers": list(peers), **facts}
        bluefog = {"op": f"MPI_{name}", "call": f"ENQUEUE_{name}"}  # what its scripts look for
        self._tracer.record_span("window", name, begun, now, {**args, **bluefog})
        return now

    def _record_transfer(
        self, kind: str, verb: str, peer: int, begun: int, now: int, version: int
    ) -> None:
        number = f"w{self.number}.{version}"  # distinct from those of other windows of the name
        facts = verb, self.name, peer, self.tensor.nbytes, begun, now, number
        self._tracer.record_transfer(kind, *facts)

    @override
    def open(self, edges: WindowEdges) -> None:
        super().open(edges)
        self._send = self._traced_send

    @override
    def put(
        self, tensor: torch.Tensor, self_weight: float, weights: Mapping[int, float], **how: Any
    ) -> WindowHandle:
        verb, begun = "win_accumulate" if how["add"] else "win_put", time.monotonic_ns()
        with self._tracer.profiler_range(verb.upper()):
            handle = super().put(tensor, self_weight, weights, **how)
        self._record_span(verb, begun, weights)
        return handle

    def _traced_send(
        self,
        buffer: RefCountedBuffer,
        weights: Mapping[int, float],
        clock: int,
        p: float,
        acquire_buffer: AcquireBuffer | None,
    ) -> list[UndeliveredMessage]:
        begun, verb = time.monotonic_ns(), "win_accumulate" if acquire_buffer else "win_put"
        messages = self.edges.send(buffer, weights, clock, p, acquire_buffer)
        now = time.monotonic_ns()
        for peer in weights:
            edge = self.edges.outgoing.get(peer)
            if edge is not None:
                self._record_transfer("send", verb, peer, begun, now, edge.published)
        return messages

    @override
    def store_get_result(self, source: int, snapshot: PublishedSnapshot, weight: float) -> None:
        begun = time.monotonic_ns()
        super().store_get_result(source, snapshot, weight)
        self._record_span("win_get", begun, [source])
        self._read[source] = self._buffers.last_read(source)[0]

    @override
    def update(self, self_weight: float, weights: Mapping[int, float], **how: Any) -> torch.Tensor:
        begun = time.monotonic_ns()
        with self._tracer.profiler_range("WIN_UPDATE"):
            result = super().update(self_weight, weights, **how)
        old = self.staleness()
        behind = {str(source): old[source].steps for source in weights}
        now = self._record_span("win_update", begun, weights, staleness=behind)
        for source in weights:
            version, _ = self._buffers.last_read(source)
            if version > self._read.get(source, 0):
                self._read[source] = version
                self._record_transfer("read", "win_update", source, begun, now, version)
        return result
