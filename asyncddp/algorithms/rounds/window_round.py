"""Base class of averaging rounds through one-sided windows, which need not wait for other ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.rounds.averaging_round import (
    AveragerState,
    AveragingRound,
    BeforeWrite,
    BucketExchange,
)
from asyncddp.algorithms.rounds.bucket_windows import BucketWindow
from asyncddp.context.context import use
from asyncddp.errors import PeerLeftError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.barrier import barrier
from asyncddp.topology import Neighbors
from asyncddp.windows.nonblocking_handle import WindowHandle


class WindowRound(AveragingRound):
    """Base class of averaging rounds through windows: publish buckets, average the received ones.

    Ranks wait for each other only with ``force_barrier`` or ``max_staleness``.
    """

    asynchronous = True
    nodes = "ranks"

    def __init__(self, averager: AveragerState, number: int) -> None:
        super().__init__(averager, number)
        near = averager.schedule_of_ranks.neighbors(averager.context.rank, number)
        self._row, self._step = self._weight_row(near), number + 1
        if averager.windows.first_round is None:
            averager.windows.first_round = number
        self._published: list[WindowHandle] = []

    @override
    @classmethod
    def prepare(cls, averager: AveragerState) -> None:
        averager.windows.ensure_created(averager.schedule_of_ranks)

    @override
    @classmethod
    def begin(cls, averager: AveragerState, number: int) -> AveragingRound | None:
        """Begin a round through windows; collective if they have to be created."""
        cls.prepare(averager)
        begun = cls(averager, number)
        if not averager.force_barrier and not averager.overlapping:
            begun.leave_out_departed()
            averager.windows.count_step()
        return begun

    # what differs between puts, gets and accumulates

    @abstractmethod
    def _weight_row(self, near: Neighbors) -> WeightRow:
        """Return this rank's weights in a round: the overrides, or else the topology's."""

    def _without(self, row: WeightRow, departed: Collection[int]) -> WeightRow:
        """Move the weights of departed neighbours to this rank's own tensor."""
        return row.without(departed)

    @abstractmethod
    def _publish(self, bucket: BucketWindow, row: WeightRow) -> WindowHandle | None:
        """Make a window's tensor available to neighbours; return a handle, or None if immediate."""

    def _asynchronous_row(self, bucket: BucketWindow) -> WeightRow:
        """Return the weights to publish with, in rounds without barriers."""
        return self._row

    def _fetch(self, bucket: BucketWindow, sources: Iterable[int]) -> None:
        """Request the neighbours' published tensors, if they do not send them."""

    @abstractmethod
    def _mix(self, bucket: BucketWindow, row: WeightRow) -> None:
        """Average the received tensors into the tensor of a window."""

    def _transfer_count(self, row: WeightRow) -> int:
        """Return the number of transfers of a bucket that are counted on this rank."""
        return len(row.dst_weights)

    def _late_neighbors(
        self, bucket: BucketWindow, sources: Iterable[int], step: int
    ) -> Iterable[int]:
        """List the neighbours, except departed ones, that have not reached a step."""
        window = bucket.window
        incoming, left = window.edges.incoming, window.context.engine.has_exited
        return [s for s in sources if incoming[s].clock() < step and not left(s)]

    # a round

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        """Publish a copy of a bucket, and request the neighbours' ones if needed."""
        averager, row, window = self._averager, self._row, self._averager.windows[bucket.index]
        with use(averager.context), torch.no_grad():
            window.pack()
            if not averager.force_barrier:
                row = self._asynchronous_row(window)
            handle = self._publish(window, row)
            if handle is not None:
                self._published.append(handle)
                if averager.max_staleness is not None:
                    window.window.tell(self._step, but=row.dst_weights)
            if not averager.force_barrier:
                self._fetch(window, self._row.src_weights)
        averager.bytes_sent += self._transfer_count(row) * bucket.flat.nbytes
        return BucketExchange(partial(self._average, window))

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        takes_part = averager.algorithm.takes_part(averager.buckets[index])
        if takes_part and index not in self._started:  # neighbours have published, if not this rank
            window = self._averager.windows[index]
            self._started[index] = BucketExchange(partial(self._average, window))
        super().finish_bucket(index, before_write)

    @override
    def leave_out_departed(self) -> None:
        got = self.how is CommunicationPattern.GET
        departed = self._averager.windows.update_departures(got=got)
        self._row = self._without(self._row, departed)

    def _average(self, bucket: BucketWindow) -> Received | None:
        """Average a bucket, leaving out neighbours whose memory can no longer be read."""
        row = self._row
        with use(self._averager.context):
            try:
                self._mix(bucket, row)
            except PeerLeftError:
                gone = bucket.window.unreadable(row.src_weights)
                self._mix(bucket, row.without(gone))
        return bucket.mixed()

    @override
    def _before_averages(self, before_write: BeforeWrite | None) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context), torch.no_grad():
            self._wait_for_late_neighbors()
            if averager.force_barrier:
                self._synchronize()

    @override
    def _after_averages(self) -> None:
        averager = self._averager
        if averager.force_barrier:
            with averager.exposed_time, use(averager.context):
                barrier()

    def _synchronize(self) -> None:
        buckets = [self._averager.windows[index] for index in self._started]
        for handle in self._published:
            handle.wait()
        for bucket in buckets:
            bucket.wait()  # for gets of earlier rounds, whose results are too old
        barrier()
        for bucket in buckets:
            self._fetch(bucket, self._row.src_weights)
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
                late.update(self._late_neighbors(averager.windows[index], sources, latest))
            return sorted(late)

        what = f"step {self._step} of {averager.label} with max_staleness={bound}"
        averager.context.engine.wait_until(lambda: not behind(), what, behind)
