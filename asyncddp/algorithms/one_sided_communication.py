"""Averaging through one-sided windows, where ranks need not wait for each other: base classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable

import torch
from typing_extensions import override

from asyncddp.algorithms.averaging_round import AveragingRound, BeforeWrite, CrossRoundState
from asyncddp.algorithms.bucket_windows import BucketWindow
from asyncddp.algorithms.communication import Communication
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.context.context import use
from asyncddp.errors import PeerLeftError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.barrier import barrier
from asyncddp.topology import Neighbors
from asyncddp.windows.nonblocking_handle import WindowHandle


class OneSidedCommunication(Communication):
    """Averaging through one-sided windows (base class): ranks need not wait for each other.

    They wait only where ``force_barrier`` or ``max_staleness`` say so.
    """

    asynchronous = True
    nodes = "ranks"

    @override
    def prepare(self, averager: CrossRoundState) -> None:
        averager.windows.ensure_created(averager.schedule_of_ranks)

    def begin_round(self, averager: CrossRoundState, number: int) -> AveragingRound | None:
        """Begin a round through windows; collective where they have to be created."""
        self.prepare(averager)
        near = averager.schedule_of_ranks.neighbors(averager.context.rank, number)
        row = self.weight_row(averager, near)
        begun = OneSidedRound(averager, self, row, number)
        if not averager.force_barrier and not averager.overlapping:
            begun.leave_out_departed()
            if averager.windows.step_rates is not None:
                averager.windows.step_rates.count()
        return begun

    @abstractmethod
    def weight_row(self, averager: CrossRoundState, near: Neighbors) -> WeightRow:
        """Return this rank's weights of a round: the overrides, or else the topology's."""

    def without(self, row: WeightRow, departed: Collection[int]) -> WeightRow:
        """Move the weights of departed neighbours to this rank's own tensor."""
        return row.without(departed)

    @abstractmethod
    def publish(self, bucket: BucketWindow, row: WeightRow, step: int) -> WindowHandle | None:
        """Make a window's tensor available to neighbours; return a handle, or None if immediate."""

    def asynchronous_row(self, bucket: BucketWindow, row: WeightRow) -> WeightRow:
        """Adapt the weights to publish with, in rounds without barriers."""
        return row

    def fetch(self, bucket: BucketWindow, sources: Iterable[int]) -> None:
        """Request what neighbours have published, where it is not sent by them."""

    @abstractmethod
    def mix(self, bucket: BucketWindow, row: WeightRow) -> None:
        """Average what has arrived into the tensor of a window."""

    def transfer_count(self, row: WeightRow) -> int:
        """Return how many times a bucket is transferred at this rank's cost."""
        return len(row.dst_weights)

    def late_neighbors(self, bucket: BucketWindow, sources: Iterable[int], step: int) -> list[int]:
        """List the neighbours, except departed ones, that have not reached a step."""
        window = bucket.window
        incoming, left = window.edges.incoming, window.context.engine.has_exited
        return [s for s in sources if incoming[s].clock() < step and not left(s)]


class OneSidedRound(AveragingRound):
    """Averaging round that publishes buckets in windows and averages what neighbours published."""

    def __init__(
        self, averager: CrossRoundState, how: OneSidedCommunication, row: WeightRow, number: int
    ) -> None:
        self._averager, self._communication, self._row = averager, how, row
        self._step = number + 1
        if averager.windows.first_round is None:
            averager.windows.first_round = number
        self._started: set[int] = set()
        self._published: list[WindowHandle] = []

    def start(self, index: int) -> None:
        """Publish a copy of a bucket, and request the neighbours' where that is needed."""
        averager, communication, row = self._averager, self._communication, self._row
        bucket = averager.windows[index]
        with averager.exposed_time, use(averager.context), torch.no_grad():
            bucket.pack()
            if not averager.force_barrier:
                row = communication.asynchronous_row(bucket, row)
            handle = communication.publish(bucket, row, self._step)
            if handle is not None:
                self._published.append(handle)
                if averager.max_staleness is not None:
                    bucket.window.tell(self._step, but=row.dst_weights)
            if not averager.force_barrier:
                communication.fetch(bucket, self._row.src_weights)
        averager.bytes_sent += (
            communication.transfer_count(row) * averager.buckets[index].flat.nbytes
        )
        self._started.add(index)

    @override
    def has_started(self, index: int) -> bool:
        return index in self._started

    @override
    def leave_out_departed(self) -> None:
        got = self._communication.how is CommunicationPattern.GET
        departed = self._averager.windows.update_departures(got=got)
        self._row = self._communication.without(self._row, departed)

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context), torch.no_grad():
            if before_write is not None:
                before_write(index)
            self._write_average(index)
        self._started.discard(index)

    def _write_average(self, index: int) -> None:
        """Average a bucket, leaving out neighbours whose memory can no longer be read."""
        bucket, row = self._averager.windows[index], self._row
        try:
            self._communication.mix(bucket, row)
        except PeerLeftError:
            gone = bucket.window.unreadable(row.src_weights)
            self._communication.mix(bucket, row.without(gone))
        bucket.unpack()

    def finish(self, before_write: BeforeWrite | None = None) -> None:
        """Average in what has arrived by now, and end the round."""
        averager = self._averager
        with averager.exposed_time, use(averager.context), torch.no_grad():
            if before_write is not None:
                for index in sorted(self._started):
                    before_write(index)
            self._wait_for_late_neighbors()
            if averager.force_barrier:
                self._synchronize()
            for index in sorted(self._started):
                self._write_average(index)
            if averager.force_barrier:
                barrier()
        averager.round += 1

    def _synchronize(self) -> None:
        buckets = [self._averager.windows[index] for index in self._started]
        for handle in self._published:
            handle.wait()
        for bucket in buckets:
            bucket.wait()  # for gets of earlier rounds, whose results are too old
        barrier()
        for bucket in buckets:
            self._communication.fetch(bucket, self._row.src_weights)
        for bucket in buckets:
            bucket.wait()

    def _wait_for_late_neighbors(self) -> None:
        averager, bound = self._averager, self._averager.max_staleness
        first = averager.windows.first_round or 0
        if bound is None or self._step - bound <= first:
            return
        latest, sources = self._step - bound, self._row.src_weights

        def behind() -> list[int]:
            late: set[int] = set()
            for index in self._started:
                one = averager.windows[index]
                late.update(self._communication.late_neighbors(one, sources, latest))
            return sorted(late)

        what = f"step {self._step} of {averager.label} with max_staleness={bound}"
        averager.context.engine.wait_until(lambda: not behind(), what, behind)
