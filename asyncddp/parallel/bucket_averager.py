"""Averages a model's buckets with neighbours; what one step sends, the next step uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from weakref import ReferenceType, ref

from asyncddp.algorithms import Algorithm, CommunicationPattern
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.methods.adapt_with_combine import AdaptWithCombine
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.rounds.averaging_round import AveragingRound
from asyncddp.context import Context
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.parallel.optimizer_buckets import OptimizerBucket
from asyncddp.topology import TopologyError, as_schedule, describe
from asyncddp.topology.builders import TopologyLike, topology_for


class _PreviousStepAveraging(Algorithm):
    """Averaging of ``adapt_with_combine``: with the neighbours' parameters of the previous step."""

    name = "DecentralizedDataParallel"
    how = (CommunicationPattern.NEIGHBORS,)
    needs = AdaptWithCombine.needs


class _AsynchronousAveraging(Algorithm):
    """Asynchronous averaging: uses the newest parameters that neighbours have put, however old."""

    name = "DecentralizedDataParallel"
    how = (CommunicationPattern.PUT,)


class BucketAverager:
    """Averages a model's buckets with the neighbours' buckets, in overlapping averaging rounds.

    A bucket is published after a step, and averaged with the neighbours' before the next update:
    the round of a step starts, bucket by bucket, while that of the step before is finished. With
    ``sync`` it waits for the neighbours' buckets of the last step; they are read in between, by the
    model and by neighbours, and must not change. Those that are not under way when a backward pass
    begins, in the first step or after new values, are sent then.
    """

    def __init__(
        self, context: Context, label: str, topology: TopologyLike | None, *, sync: bool
    ) -> None:
        method = _PreviousStepAveraging() if sync else _AsynchronousAveraging()
        self.averager = ModelAverager(context, method, None, None, label)
        self.averager.overlapping = True
        self.buckets: Sequence[OptimizerBucket] = ()
        self._sync = sync
        self._averaged: set[int] = set()
        self._rounds = _PendingRounds(self)
        self.set_topology(topology)

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Use another topology for buckets that are published from now on.

        Collective where they go through windows, which are created anew along it.
        """
        context = self.averager.context
        given = context.topologies.given
        given = given if topology is None else topology_for(topology, context.size)
        if not self._sync and as_schedule(given).period is None:
            raise TopologyError(
                f"argument topology: {describe(given)} never repeats, so that its edges are not "
                "known; with sync=False use a graph, or a schedule with a period"
            )
        self.averager.set_topology(topology)
        if not self._sync and self.buckets:
            self.register_buckets(self.buckets)

    def register_buckets(self, buckets: Sequence[OptimizerBucket]) -> None:
        """Set the buckets; collective."""
        self.buckets = buckets
        self.averager.set_buckets(
            [
                AveragedBucket(bucket.index, bucket.flat, bucket.layout, bucket.optimizer)
                for bucket in buckets
            ]
        )
        if not self._sync:
            self.restart(averaged=False)

    # a step

    def begin_step(self) -> None:
        """Prepare for the step of a backward pass that has begun."""
        rounds = self._rounds
        if rounds.current is None:
            rounds.current = self.averager.begin_round()
        if rounds.current is None:
            return
        rounds.current.leave_out_departed()
        if self._sync:
            for bucket in self.buckets:
                self._send_unsent(rounds.current, bucket)

    def _send_unsent(self, current: AveragingRound, bucket: OptimizerBucket) -> None:
        if bucket.index not in self._averaged and not current.has_started(bucket.index):
            self._send(current, bucket)

    def _send(self, pending_round: AveragingRound, bucket: OptimizerBucket) -> None:
        bucket.pack()
        bucket.record_versions()
        pending_round.start(bucket.index)

    def average(self, bucket: OptimizerBucket) -> None:
        """Write the average with the neighbours into a bucket's parameters."""
        current = self._rounds.current
        if current is None or bucket.index in self._averaged:
            return
        if self._sync:
            self._send_unsent(current, bucket)
            current.finish_bucket(bucket.index, lambda _: bucket.check_unchanged())
        else:
            bucket.pack()
            current.finish_bucket(bucket.index)
        bucket.unpack()
        self._averaged.add(bucket.index)

    def publish(self, bucket: OptimizerBucket) -> None:
        """Publish a bucket's parameters after a step to the neighbours of the next step."""
        rounds = self._rounds
        if rounds.following is None:
            rounds.following = self.averager.begin_round(ahead=1)
        if rounds.following is not None:
            self._send(rounds.following, bucket)
        self._averaged.discard(bucket.index)

    def end_step(self) -> None:
        """Count a step, once all buckets were averaged and published."""
        self.averager.end_round()
        self._rounds.current, self._rounds.following = self._rounds.following, None

    # around steps

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads the buckets; averages are kept for their step."""
        self._rounds.wait()

    def average_pending(self) -> None:
        """Write all pending averages, ahead of their step."""
        current = self._rounds.current
        if self._sync and current is not None:
            for bucket in self.buckets:
                if current.has_started(bucket.index):
                    self.average(bucket)

    def restart(self, *, averaged: bool) -> None:
        """Restart communication after the parameters of all ranks got new values; collective."""
        self.wait_for_reads()
        self._rounds.current, self._averaged = None, set()
        if self._sync and averaged:
            self._averaged = {bucket.index for bucket in self.buckets}
        if not self._sync and self.buckets and not self.averager.single_rank:
            for bucket in self.buckets:
                bucket.pack()
            step = self.averager.round + 1
            self.averager.bytes_sent += self.averager.windows.publish_to_all(step)

    def close(self) -> None:
        """Wait until no neighbour reads the parameters, and free windows, which is collective."""
        self._rounds()
        self._rounds.current = None
        with suppress(PeerError, NotInitializedError):
            self.averager.windows.free()
        self.buckets = ()


class _PendingRounds:
    """Averaging rounds in progress, whose messages are waited for when the context closes.

    A rank must not leave the world before its neighbours have its messages.
    """

    def __init__(self, owner: BucketAverager) -> None:
        self.current: AveragingRound | None = None
        """The round of the present step, or the next one between steps."""
        self.following: AveragingRound | None = None
        """The round of the step after it."""
        self._owner: ReferenceType[BucketAverager] = ref(owner)
        callbacks = owner.averager.context.exit_callbacks
        callbacks[:] = [c for c in callbacks if not (isinstance(c, _PendingRounds) and c.is_over)]
        callbacks.append(self)

    def _pending(self) -> list[AveragingRound]:
        return [one for one in (self.current, self.following) if one is not None]

    @property
    def is_over(self) -> bool:
        """True if the owner is gone and all messages have arrived."""
        return self._owner() is None and all([one.is_complete for one in self._pending()])

    def wait(self) -> None:
        """Wait until no message or peer reads a bucket any more."""
        for one in self._pending():
            one.wait_for_reads()

    def __call__(self) -> None:
        """Wait for all messages that can still arrive."""
        with suppress(PeerError, NotInitializedError):
            self.wait()
