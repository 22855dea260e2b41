"""Fast path of neighbour averages that records spans in the timeline."""

from __future__ import annotations

import time
from typing import Any

import torch
from typing_extensions import override

from asyncddp.engine import Handle
from asyncddp.engine.pairwise_averaging import PairwiseAveraging
from asyncddp.engine.tracing import TracedReceiveRingBuffer
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.deferred_average import SentAverage
from asyncddp.ops.shared_memory_fast_path import NeighborAverageFastPath
from asyncddp.timeline.tracer import Tracer


class TimelineRecordingFastPath(NeighborAverageFastPath):
    """Fast path of neighbour averages that records its calls and waits in the timeline."""

    fuses = False  # each has spans of its own
    _profiled = True  # the tracer makes the range

    def __init__(self, tracer: Tracer, *details: Any) -> None:
        super().__init__(*details)
        self._tracer = tracer

    @override
    def run(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self.is_ready(row):
            return None
        with self._tracer.enqueue_span(self.verb, self.name, tensor.nbytes) as call:
            result = super().run(row, tensor, out)
            if result is None:
                call.discard()
            return result

    @override
    def start(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor] | None:
        with self._tracer.enqueue_span(self.verb, self.name, tensor.nbytes) as call:
            handle = super().start(row, tensor, out)
            if handle is None:
                call.discard()
            return handle

    @override
    def finish(self, average: SentAverage) -> torch.Tensor | Handle[torch.Tensor]:
        step, row, *_ = average
        waiting = self._tracer.start_wait(self.verb, self.name, row.sources)
        known = waiting.mixes
        try:
            found = super().finish(average)
            receive_ring = self._receive_ring(row)
            if receive_ring and waiting.mixes == known and receive_ring.last_read[0] == step:
                self._record_mix(row, *receive_ring.last_read[1:], self.channel.layout.numel)
            return found
        finally:
            waiting.end()

    @override
    def _average_chunked(self, *args: Any, **kwargs: Any) -> torch.Tensor | Handle[torch.Tensor]:
        waiting = self._tracer.start_wait(self.verb, self.name, args[1].sources)
        try:
            return super()._average_chunked(*args, **kwargs)
        finally:
            waiting.end()

    @override
    def _try_pairwise(
        self, pairwise: PairwiseAveraging, row: WeightRow, own: torch.Tensor, out: torch.Tensor
    ) -> bool:
        step, layout = self.channel.in_flight[0], self.channel.layout
        waiting = self._tracer.start_wait(self.verb, self.name, row.sources)
        try:
            moved = super()._try_pairwise(pairwise, row, own, out)
            receive_ring = self._receive_ring(row)
            if receive_ring is not None and moved:
                self._record_mix(row, *receive_ring.last_read[1:], layout.numel)
            elif receive_ring is not None and pairwise.chunks_read:
                begun, count = receive_ring.read_begun(step), pairwise.chunks_read
                self._record_mix(row, begun, time.monotonic_ns(), count * layout.chunk_numel)
            return moved
        finally:
            waiting.end()

    def _receive_ring(self, row: WeightRow) -> TracedReceiveRingBuffer | None:
        """Return the ring buffer of the only in-neighbour, if it is traced."""
        receive_ring = self.channel.receive_rings.get(row.sources[0]) if row.sources else None
        return receive_ring if isinstance(receive_ring, TracedReceiveRingBuffer) else None

    def _record_mix(self, row: WeightRow, begun: int, over: int, count: int) -> None:
        nbytes = count * self.channel.layout.dtype.itemsize
        self._tracer.record_mix(self.verb, self.name, begun, over, nbytes, row.sources)
