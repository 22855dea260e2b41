"""Asynchronous bucket communicator: publishes and averages buckets through one-sided windows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import NotInitializedError, PeerError, PeerLeftError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.barrier import barrier
from asyncddp.ops.windows import (
    create_along,
    win_free,
    win_put_nonblocking,
    win_staleness,
    win_update,
)
from asyncddp.parallel.bucket_communicator import BucketCommunicator
from asyncddp.parallel.optimizer_buckets import OptimizerBucket
from asyncddp.windows import Staleness, Window, windows_of
from asyncddp.windows.departure_detector import DepartureDetector
from asyncddp.windows.nonblocking_handle import WindowHandle
from topology import GraphOrSchedule, Schedule, TopologyError, describe


class WindowBucketCommunicator(BucketCommunicator):
    """Asynchronous communicator: averages each bucket through a window, without waiting.

    A bucket is put into the neighbours' windows after a step, and averaged with what they have put
    before the next update. The own term of the average is the current parameter, a neighbour's is
    its latest put.
    """

    _window_schedule: Schedule

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        self._departures = DepartureDetector(context.engine.has_exited)
        super().__init__(context, label, topology)

    def checked_schedule(self, topology: GraphOrSchedule) -> Schedule:
        """Check a topology, whose edges of all rounds must be known to create windows."""
        schedule = super().checked_schedule(topology)
        if schedule.period is None:
            raise TopologyError(
                f"argument topology: {describe(topology)} never repeats, so that its edges are not "
                "known; with sync=False use a graph, or a schedule with a period"
            )
        return schedule

    def set_topology(self, topology: GraphOrSchedule | None) -> None:
        """Use another topology, and recreate the windows along it; collective."""
        super().set_topology(topology)
        if self.buckets:
            self._free()
            self._create()

    def register_buckets(self, buckets: Sequence[OptimizerBucket]) -> None:
        """Set the buckets, create their windows and publish them; collective."""
        super().register_buckets(buckets)
        self._create()

    def _create(self) -> None:
        self._window_schedule = self.schedule
        with use(self.context):
            for bucket in self.buckets:
                bucket.pack()
                create_along(self._window_schedule, bucket.flat, self.message_name(bucket))
        self.restart(mixed=False)

    def _free(self) -> None:
        with use(self.context):
            for bucket in self.buckets:
                win_free(self.message_name(bucket))

    @property
    def departed(self) -> tuple[int, ...]:
        """Neighbours that had departed in the last step, ascending."""
        return self._departures.now

    def begin_step(self, step: int) -> None:
        """Find out which neighbours have departed; buckets were published after the last step."""
        for window in self._windows()[:1]:  # all buckets make the same steps
            sources = window.edges.incoming
            steps = {source: window.known_steps_of(source, got=False) for source in sources}
            self._departures.look(window.steps, steps)

    def _windows(self) -> list[Window]:
        find = windows_of(self.context).find
        return [
            find("DecentralizedDataParallel", self.message_name(bucket)) for bucket in self.buckets
        ]

    def mix(self, bucket: OptimizerBucket, step: int) -> None:
        """Average with the latest put of each neighbour."""
        near = self._window_schedule.neighbors(self.context.rank, step)
        row = WeightRow(near.self_weight, near.src_weights, {})
        with use(self.context), torch.no_grad():
            bucket.pack()
            self._update(bucket, row.without(self.departed))
            bucket.unpack()

    def _update(self, bucket: OptimizerBucket, row: WeightRow) -> None:
        """Update the window, leaving out neighbours whose memory can no longer be read."""
        name = self.message_name(bucket)
        try:
            win_update(name, row.self_weight, row.src_weights)
        except PeerLeftError:
            window = windows_of(self.context).find("DecentralizedDataParallel", name)
            row = row.without(window.unreadable(row.src_weights))
            win_update(name, row.self_weight, row.src_weights)

    def publish(self, bucket: OptimizerBucket, step: int) -> None:
        """Put the bucket into the windows of the ranks that average it in that round."""
        with use(self.context):
            self._put(bucket, self._window_schedule.neighbors(self.context.rank, step).dst_ranks)

    def _put(self, bucket: OptimizerBucket, ranks: Sequence[int]) -> WindowHandle:
        bucket.pack()
        self.bytes_sent += len(ranks) * bucket.flat.nbytes
        return win_put_nonblocking(bucket.flat, self.message_name(bucket), dst_weights=ranks)

    def wait_for_reads(self) -> None:
        """Return at once, since neighbours read copies."""

    def mix_pending(self, step: int) -> None:
        """Do nothing, since no step waits for a pending average."""

    def restart(self, *, mixed: bool) -> None:
        """Publish the new values to all neighbours, and wait until all ranks have done so."""
        if not self.buckets:
            return
        rounds = range(self._window_schedule.period or 1)
        targets = [self._window_schedule.neighbors(self.context.rank, k).dst_ranks for k in rounds]
        ranks = sorted({rank for ranks in targets for rank in ranks})
        with use(self.context):
            for handle in [self._put(bucket, ranks) for bucket in self.buckets]:
                handle.wait()
            barrier()

    def conclude(self) -> None:
        """Announce that no step follows, so that neighbours take over this rank's weight."""
        for window in self._windows():
            window.conclude().wait()

    def resume(self) -> None:
        """Announce that steps follow again."""
        for window in self._windows():
            window.resume()

    def close(self) -> None:
        """Free the windows; collective."""
        with suppress(PeerError, NotInitializedError):
            self._free()
        self.buckets = ()

    def staleness(self) -> dict[int, Staleness]:
        """Return how old the tensors last read of each neighbour are, in the oldest bucket."""
        worst: dict[int, Staleness] = {}
        with use(self.context):
            for bucket in self.buckets:
                for rank, found in win_staleness(self.message_name(bucket)).items():
                    known = worst.get(rank, found)
                    worst[rank] = max(known, found, key=lambda one: (one.steps, one.seconds))
        return worst
