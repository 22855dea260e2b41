"""Fast path of repeated neighbour averages: runs on the calling thread, over shared memory.

A tensor that was averaged before under the same name, dtype and shape goes through the ring buffers
of its persistent channel. If a neighbour does not come at once, or anything differs from the last
time, the engine takes over at the point that was reached, with its deadlines and checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from asyncddp.context import Context
from asyncddp.context.topologies import Topologies
from asyncddp.engine import ChunkedExchange, Handle, OperationExchanges, OperationSpec, Steps
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.pairwise_averaging import PairwiseAveraging, poll_briefly
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.errors import PeerError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.membership import View
from asyncddp.ops.average_queue import AverageQueue
from asyncddp.ops.deferred_average import DeferredAverageHandle, SentAverage, detached
from asyncddp.ops.weighted_average import average_chunks, exchange_and_average
from asyncddp.shm.ring_buffer import SendRingBuffer
from asyncddp.tensors.allocation import empty
from asyncddp.timeline.profiler_range import ProfilerRange
from asyncddp.topology import Schedule

R = TypeVar("R")
_SMALL = 1 << 19  # bytes of a tensor that the calling thread of a non-blocking call may copy


class NeighborAverageFastPath:
    """Fast path of one repeated neighbour average: runs on the calling thread, over shared memory.

    Its persistent channel belongs to a verb, the name that neighbours match, a dtype and a shape.
    """

    fuses = True
    _profiled = False

    def __init__(self, context: Context, channel: PersistentChannel) -> None:
        self._engine, self.channel, self._rank = context.engine, channel, context.rank
        self.verb, self.name = channel.signature.verb, channel.name
        self.use = self.verb, self.name, channel.in_flight
        self.is_large = channel.layout.nbytes > _SMALL
        self._is_whole = channel.layout.num_chunks == 1
        self._served: tuple[WeightRow, SendRingBuffer | None] | None = None
        self._queue = AverageQueue.of(context.engine)
        self._channels = context.engine.matcher.channels
        self._schedule: Schedule | None = None
        self._view: View | None = None  # by whose topology the row was chosen, in elastic runs
        self._rows: dict[int, WeightRow] = {}
        self._transport, group = context.transport, context.transport.ring_group
        self._is_notified = group is not None and group.notify is not None
        self._pause = os.sched_yield if context.transport.cores_shared else None

    def weight_row(self, topologies: Topologies, number: int | None) -> WeightRow:
        """Return the weights of a round in the topology in use; by default of the next round."""
        schedule, membership = topologies.ranks, self._engine.membership
        if membership is not None:
            self._view = membership.view_at(self.name, self._engine.use_count(self.name))
            schedule = topologies.of_view(self._view)
        if number is None:
            number = self._engine.round_count(self.verb, self.name)
        if schedule is not self._schedule:
            self._schedule, self._rows = schedule, {}
        if schedule.period is not None:
            number %= schedule.period
        row = self._rows.get(number)
        if row is None:
            near = schedule.neighbors(self._rank, number)
            targets = dict.fromkeys(near.dst_ranks, 1.0)
            row = WeightRow(near.self_weight, near.src_weights, targets)
            if schedule.period is not None:
                self._rows[number] = row
        return row

    def is_ready(self, row: WeightRow) -> bool:
        """Return True if ring buffers connect all neighbours, and no exchange is in flight."""
        channel, queue = self.channel, self._queue
        if queue.unsent:
            queue.send()
        if channel.in_flight and channel.deferred:
            queue.complete(channel.deferred[-1])
        return (
            not channel.in_flight
            and row.common_factor is not None
            and channel.serves(row.sources, row.targets)
        )

    def run(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Average a tensor and return the result; return None, having done nothing, if it cannot.

        ``tensor`` and ``out`` are contiguous, on the host, and of the channel's dtype and shape.
        """
        if profiler._is_profiler_enabled and not self._profiled:
            return self._run_profiled(self.run, row, tensor, out)
        channel = self.channel
        if not self.is_ready(row):
            return None
        own, into = detached(tensor), None if out is None else detached(out)
        step = self._engine.count_use(self.verb, self.name, channel.in_flight, self._view)
        if step is None:
            return None
        found: torch.Tensor | Handle[torch.Tensor] | None = None
        try:
            if not row.is_pairwise:
                found = self._average_chunked(step, row, own, into)
            elif not self.is_large or (self._is_whole and not self._read_in_place(own, into)):
                sent_chunks = int(
                    channel.send_ring is None or channel.send_ring.try_send(step, row.targets, own)
                )
                found = self.finish((step, row, own, into, sent_chunks))
            else:
                found = self._average_pairwise(step, row, own, into)
        finally:
            if found is None:
                self._abort(step, row)
        result = found.wait() if isinstance(found, Handle) else found
        return result if out is None else out

    def _read_in_place(self, own: torch.Tensor, into: torch.Tensor | None) -> bool:
        """Return True if neighbours may read a tensor in its own shared memory."""
        if into is not None and into.data_ptr() == own.data_ptr():
            return False
        return self._channels.handle_of(own) is not None

    def start(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor] | None:
        """Start an average that waiting for the handle completes; return None if it cannot."""
        if profiler._is_profiler_enabled and not self._profiled:
            return self._run_profiled(self.start, row, tensor, out)
        if self._view is not None:  # which may be over when the tensor is sent
            return None
        if out is not None and out.is_inference():  # it must be written in this mode, not later
            self._queue.send()
            self._queue.hand_over(self.channel)
            return None
        self._engine.enter(self.verb)
        own, into = detached(tensor), None if out is None else detached(out)
        handle = DeferredAverageHandle(self._queue, self, row, own, into, out)
        self._queue.add(handle)
        return handle

    def _run_profiled(self, path: Callable[..., R], *args: Any) -> R:
        self._profiled = True
        try:
            with ProfilerRange(f"ENQUEUE_{self.verb.upper()}"):
                return path(*args)
        finally:
            self._profiled = False

    def can_send(self, row: WeightRow) -> bool:
        """Return True if sending, and receiving from the neighbours, can bypass the engine."""
        channel, send_ring, served = self.channel, self.channel.send_ring, self._served
        if served is None or served[0] is not row or served[1] is not send_ring:
            if row.common_factor != 1.0 or not channel.serves(row.sources, row.targets):
                return False
            self._served = row, send_ring
        return len(channel.in_flight) == len(channel.deferred) and (
            send_ring is None
            or self.is_large
            or send_ring.has_room(self._engine.use_count(self.name))
        )

    def finish(self, average: SentAverage) -> torch.Tensor | Handle[torch.Tensor]:
        """Average a one-chunk tensor that was sent, or submit the rest to the engine."""
        step, row, own, out, sent_chunks = average
        channel = self.channel
        if sent_chunks and row.is_pairwise:
            receive_ring = channel.receive_rings[row.sources[0]]
            other = receive_ring.read_whole(step)
            if other is None and self._wait_briefly(
                lambda: receive_ring.read_whole(step) is not None, pure=True
            ):
                other = receive_ring.read_whole(step)
            if other is not None:
                result = torch.lerp(own, other, row.lerp_weight, out=out)  # type: ignore[arg-type]  # a number
                receive_ring.acknowledge(step, 1)
                channel.record(step, row.sources, row.targets)
                channel.in_flight.popleft()
                return result
        return self._average_chunked(step, row, own, out, sent_chunks=sent_chunks)

    def submit(
        self, row: WeightRow, own: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Submit an average that has not started to the engine."""

        def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
            op.tolerates_loss = True
            return (yield from exchange_and_average(op, own, row, own.dtype, out))

        return self._engine.submit(OperationSpec(self.verb, steps, self.name, begun=True))

    def hand_to_engine(self, average: SentAverage) -> Handle[torch.Tensor]:
        """Submit the rest of an average to the engine, so that neighbours need not wait."""
        step, row, own, out, sent_chunks = average
        exchange = self._make_exchange(step, row, sent_chunks)
        return self._submit_rest(exchange, average_chunks(exchange, own, row, own.dtype, out))

    def _submit_rest(
        self, exchange: ChunkedExchange, rest: Steps[torch.Tensor]
    ) -> Handle[torch.Tensor]:
        """Submit the rest of an exchange to the engine, which continues it from there."""

        def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
            op.tolerates_loss = True
            op.adopt(exchange)
            return (yield from rest)

        return self._engine.submit(OperationSpec(self.verb, steps, self.name), exchange.key)

    def _abort(self, step: int, row: WeightRow) -> None:
        """Fail an average that was interrupted, for example by Ctrl-C, and notify the peers."""
        if step in self.channel.in_flight:
            exchange = self._make_exchange(step, row, 0)
            what = f"rank {self._rank}: {self.verb} {exchange.key}"
            self._submit_rest(exchange, _raising(PeerError(f"{what} was interrupted")))

    def _average_pairwise(
        self, step: int, row: WeightRow, own: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | Handle[torch.Tensor]:
        channel = self.channel
        result = empty(own.shape, own.dtype) if out is None else out
        pairwise = PairwiseAveraging(
            channel.send_ring, channel.receive_rings[row.sources[0]], step, row.targets, self._pause
        )
        if self._try_pairwise(pairwise, row, own, result):
            channel.record(step, row.sources, row.targets)
            channel.in_flight.popleft()
            return result
        return self._average_chunked(
            step, row, own, result, sent_chunks=pairwise.chunks_sent, start=pairwise.chunks_read
        )

    def _try_pairwise(
        self, pairwise: PairwiseAveraging, row: WeightRow, own: torch.Tensor, out: torch.Tensor
    ) -> bool:
        """Try the pairwise exchange; return True if it has completed."""
        weight: float = row.lerp_weight  # type: ignore[assignment]  # a number where the row is pairwise
        split = self.channel.layout.split
        own_handle = self._channels.handle_of(own) if self._read_in_place(own, out) else None
        if not pairwise.begin(own_handle):
            return False
        if own_handle is None:
            return pairwise.average_chunks(split(own), split(out), weight)
        handle = pairwise.peer_handle()
        if handle is None:
            return False
        other = self._channels.map_tensor(row.sources[0], self.channel, handle)
        return pairwise.average_mapped(own.view(-1), other, out.view(-1), weight)

    def _average_chunked(
        self,
        step: int,
        row: WeightRow,
        own: torch.Tensor,
        out: torch.Tensor | None,
        *,
        sent_chunks: int = 0,
        start: int = 0,
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Average chunk by chunk as long as peers keep up; then submit the rest to the engine."""
        exchange = self._make_exchange(step, row, sent_chunks)
        steps = average_chunks(exchange, own, row, own.dtype, out, start)
        try:
            while self._wait_briefly(next(steps).done):
                pass
        except StopIteration as stop:
            exchange.close(failed=False)
            result: torch.Tensor = stop.value
            return result
        except PeerError as error:
            return self._submit_rest(exchange, _raising(error))
        return self._submit_rest(exchange, steps)

    def _wait_briefly(self, condition: Callable[[], bool], *, pure: bool = False) -> bool:
        if self._is_notified:
            return self._transport.wait_briefly(condition, pure=pure)
        return poll_briefly(condition, self._pause)

    def _make_exchange(self, step: int, row: WeightRow, sent_chunks: int) -> ChunkedExchange:
        key, channel = MatchKey(self.name, step), self.channel
        facts = key, channel.signature, row.sources, row.targets
        return ChunkedExchange(self._channels, channel, *facts, begun=True, published=sent_chunks)


def _raising(error: PeerError) -> Steps[torch.Tensor]:
    """Raise an error as the first step of an operation, so that peers are notified."""
    yield from ()
    raise error
