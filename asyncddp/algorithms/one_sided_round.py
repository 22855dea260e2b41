"""One-sided averaging round: publish the buckets, then average in what has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from asyncddp.algorithms.averaging_round import AveragingRound
from asyncddp.algorithms.timer import count_exposed_time
from asyncddp.context.context import use
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.barrier import barrier
from asyncddp.windows.nonblocking_handle import WindowHandle

if TYPE_CHECKING:
    from asyncddp.algorithms.model_averager import ModelAverager
    from asyncddp.algorithms.one_sided_communication import OneSidedCommunication


class OneSidedRound(AveragingRound):
    """One-sided averaging round: publishes buckets in windows, averages in what has arrived.

    Args:
        averager: The averager whose round it is.
        communication: The one-sided communication to use.
        row: The weights of this round.
    """

    def __init__(
        self, averager: ModelAverager, communication: OneSidedCommunication, row: WeightRow
    ) -> None:
        self._averager, self._communication, self._row = averager, communication, row
        self._step = averager.round + 1
        if averager.windows.first_round is None:
            averager.windows.first_round = averager.round
        self._flats: dict[int, torch.Tensor] = {}
        self._published: list[WindowHandle] = []

    @count_exposed_time
    def start(self, index: int, flat: torch.Tensor) -> None:
        """Publish a copy of a bucket, and request the neighbours' where that is needed."""
        averager, communication = self._averager, self._communication
        bucket_window = averager.windows[index]
        with use(averager.context), torch.no_grad():
            bucket_window.pack(flat)
            row = (
                self._row
                if averager.force_barrier
                else communication.asynchronous_row(bucket_window, self._row)
            )
            handle = communication.publish(bucket_window, row, self._step)
            if handle is not None:
                self._published.append(handle)
                if averager.max_staleness is not None:
                    bucket_window.announce_step(self._step, but=row.dst_weights)
            if not averager.force_barrier:
                communication.fetch(bucket_window, self._row.src_weights)
        averager.bytes_sent += communication.transfer_count(row) * flat.nbytes
        self._flats[index] = flat

    def has_started(self, index: int) -> bool:
        """Return whether bucket ``index`` was published."""
        return index in self._flats

    def wait_for_reads(self) -> None:
        """Return at once, since peers read copies and never the buckets."""

    @count_exposed_time
    def finish(self, before_write: Callable[[int], None] | None = None) -> None:
        """Average in what has arrived by now, and end the round.

        Args:
            before_write: Called with the index of each bucket before any average is written.

        Raises:
            PeerError: A neighbour that has to be waited for is late or gone.
        """
        for index in self._flats:
            if before_write is not None:
                before_write(index)
        averager = self._averager
        with use(averager.context), torch.no_grad():
            self._wait_for_late_neighbors()
            if averager.force_barrier:
                self._synchronize()
            for index, flat in self._flats.items():
                self._communication.mix_readable(averager.windows[index], self._row)
                averager.windows[index].unpack(flat)
            if averager.force_barrier:
                barrier()
        averager.round += 1

    def _synchronize(self) -> None:
        """Wait until all ranks have published, and fetch what neighbours have published."""
        bucket_windows = [self._averager.windows[index] for index in self._flats]
        for handle in self._published:
            handle.wait()
        for bucket_window in bucket_windows:
            bucket_window.wait()  # for gets of earlier rounds, whose results are too old
        barrier()
        for bucket_window in bucket_windows:
            self._communication.fetch(bucket_window, self._row.src_weights)
        for bucket_window in bucket_windows:
            bucket_window.wait()

    def _wait_for_late_neighbors(self) -> None:
        """Wait for neighbours that are more than ``max_staleness`` steps behind."""
        averager, bound = self._averager, self._averager.max_staleness
        first = averager.windows.first_round or 0
        if bound is None or self._step - bound <= first:
            return
        bucket_windows = [averager.windows[index] for index in self._flats]
        latest, sources = self._step - bound, self._row.src_weights

        def behind() -> list[int]:
            """List the neighbours that lag too far behind."""
            late = (
                self._communication.late_neighbors(bucket_window, sources, latest)
                for bucket_window in bucket_windows
            )
            return sorted({source for some in late for source in some})

        what = f"step {self._step} of {averager.label} with max_staleness={bound}"
        averager.context.engine.wait_until(lambda: not behind(), what, behind)
