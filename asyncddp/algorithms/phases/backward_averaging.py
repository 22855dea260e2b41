"""Communication phase that averages parameters and makes optimizer steps in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.methods.adapt_with_combine import AdaptWithCombine
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    CommunicationPhase,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.phases.optimizer_buckets import (
    BucketUpdateConfig,
    NamedParameters,
    OptimizedParameters,
    OptimizerBucket,
    TrainingObserver,
    build_buckets,
    describe_ready_order,
)
from asyncddp.algorithms.rounds.averaging_round import AveragingRound
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.context import Context
from asyncddp.errors import NotInitializedError, PeerError, UsageError
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.topology import TopologyError, as_schedule, describe
from asyncddp.topology.builders import TopologyLike, topology_for

_NAME = "DecentralizedDataParallel"


class _PreviousStepAveraging(Algorithm):
    """Algorithm for ``sync=True``: averages with neighbours' parameters of the previous step."""

    name = _NAME
    how = (CommunicationPattern.NEIGHBORS,)
    needs = AdaptWithCombine.needs


class _AsynchronousAveraging(Algorithm):
    """Algorithm for ``sync=False``: averages with the parameters that neighbours last put here."""

    name = _NAME
    how = (CommunicationPattern.PUT,)


class BackwardAveragingPhase(CommunicationPhase):
    """Communication phase that averages, updates and sends each bucket during the backward pass.

    The order of gradients is recorded in the first pass; at its end the buckets are created, and
    its step is made. From then on a bucket makes its step as soon as all its gradients are ready.
    Buckets with missing gradients make their step at the end of the pass, and so do all buckets if
    updates need all gradients.

    A bucket is sent after a step, and averaged with the neighbours' before the next update: the
    round of a step starts, bucket by bucket, while the previous round is finished. With ``sync`` it
    waits for the neighbours' buckets of the last step. In between, the model and neighbours read
    the buckets, which must not change. Buckets that are not in flight when a backward pass begins,
    in the first step or after new values, are sent then.

    Attributes:
        buckets: The buckets, each with an optimizer; none before the end of the first pass.
        observer: Notified of updates.
        restore: Restores the state of a new bucket's optimizer, if a state was loaded before.
    """

    needs_gradient_hooks = False
    restore: Callable[[OptimizedParameters], None] | None = None

    def __init__(
        self,
        named: NamedParameters,
        updates: BucketUpdateConfig,
        tracer: NullTrainingTracer,
        context: Context,
        label: str,
        topology: TopologyLike | None,
        *,
        sync: bool,
    ) -> None:
        method = _PreviousStepAveraging() if sync else _AsynchronousAveraging()
        averager = ModelAverager(context, method, None, None, label)
        averager.overlapping = True
        every: Any = SimpleNamespace(param_groups=[{"params": [one for _, one in named]}])
        super().__init__(
            PhaseConfig(
                averager,
                every,
                (),
                bucket_bytes=updates.bucket_bytes,
                training_tracer=tracer,
            )
        )
        self.named_parameters = list(named)
        self._named, self._updates, self._sync = named, updates, sync
        self.buckets: list[OptimizerBucket] = []
        self._gradient_counts: dict[int, int] = {}
        """Number of gradients of each parameter in the first pass, in the order of its last one."""
        self._bucket_of: dict[int, OptimizerBucket] = {}
        self._missing_gradients: list[dict[int, int]] = []
        self._stepped_buckets: set[int] = set()
        self._averaged: set[int] = set()
        self.observer: TrainingObserver | None = None
        self._rounds = _PendingRounds(self)
        self.set_topology(topology)

    @override
    def set_topology(self, topology: TopologyLike | None) -> None:
        context = self.averager.context
        given = context.topologies.given
        given = given if topology is None else topology_for(topology, context.size)
        if not self._sync and as_schedule(given).period is None:
            raise TopologyError(
                f"argument topology: {describe(given)} never repeats, so that its edges are not "
                "known; with sync=False use a graph, or a schedule with a period"
            )
        super().set_topology(topology)
        if not self._sync and self.buckets:
            self._register_buckets()

    # a step

    def count_gradient(self, index: int, *, first: bool) -> None:
        """Count a gradient; make the step of its bucket if all its gradients are ready."""
        if not self.buckets:
            self._gradient_counts[index] = self._gradient_counts.pop(index, 0) + 1
            return
        if first:
            self._begin_step()
        if self._updates.updates_together:
            return
        bucket = self._bucket_of[index]
        if bucket.index in self._stepped_buckets:
            raise UsageError(
                f"parameter {self.named_parameters[index][0]} got another gradient after its "
                "update in the same backward pass, which it did not in the first; use "
                "checkpoint(..., use_reentrant=False), or a grad_clip_norm, which updates at the "
                "end of the pass"
            )
        missing = self._missing_gradients[bucket.index]
        left = missing.pop(index, 1) - 1
        if left:
            missing[index] = left
        if not missing:
            self._step_bucket(bucket, update=True)

    def _begin_step(self) -> None:
        self._stepped_buckets, counts, rounds = set(), self._gradient_counts, self._rounds
        self._missing_gradients = [
            {index: counts.get(index, 1) for index in bucket.members} for bucket in self.buckets
        ]
        if rounds.current is None:
            rounds.current = self.averager.begin_round()
        if rounds.current is None:
            return
        rounds.current.leave_out_departed()
        if self._sync:
            for bucket in self.buckets:
                self._send_unsent(rounds.current, bucket)

    def _step_bucket(self, bucket: OptimizerBucket, *, update: bool) -> None:
        r"""Make the step of one bucket: :math:`x \leftarrow (W x) - u`, then send it."""
        self._average(bucket)
        step: Callable[..., None] = bucket.step
        if update:
            step = self.config.training_tracer.update(step, bucket.index)
            if self.observer is not None and not self._updates.updates_together:
                self.observer.before_update(bucket)
        step(update=update)
        rounds = self._rounds
        if rounds.following is None:
            rounds.following = self.averager.begin_round(ahead=1)
        if rounds.following is not None:
            self._send(rounds.following, bucket)
        self._averaged.discard(bucket.index)
        self._stepped_buckets.add(bucket.index)

    def _average(self, bucket: OptimizerBucket) -> None:
        """Average a bucket's parameters with the neighbours'."""
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

    def _send_unsent(self, current: AveragingRound, bucket: OptimizerBucket) -> None:
        if bucket.index not in self._averaged and not current.has_started(bucket.index):
            self._send(current, bucket)

    def _send(self, pending_round: AveragingRound, bucket: OptimizerBucket) -> None:
        bucket.pack()
        bucket.record_versions()
        pending_round.start(bucket.index)

    def step_remaining(self, *, update: bool) -> None:
        """Make the step of all remaining buckets, with or without an update."""
        for bucket in self.buckets:
            if bucket.index not in self._stepped_buckets:
                self._step_bucket(bucket, update=update)

    @override
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Make the step of all remaining buckets, by ``update`` if that needs all gradients."""
        if not self.buckets:
            self.build_buckets()
            self._begin_step()
        if self._updates.updates_together:
            update(closure)
        self.step_remaining(update=not self._updates.updates_together)
        self.end_step()

    def end_step(self) -> None:
        """End a step, after all buckets were averaged and sent."""
        self._unify_copies()
        self.averager.end_round()
        self._rounds.current, self._rounds.following = self._rounds.following, None
        self.config.training_tracer.end_step()

    def end_failed_step(self) -> bool:
        """Average the remaining buckets of a failed step; return whether there are buckets."""
        if not self.buckets:
            self._gradient_counts.clear()
            return False
        self.step_remaining(update=False)
        return True

    # the buckets

    @override
    def build_buckets(self) -> None:
        """Create the buckets in the recorded order of gradients; collective."""
        named, averager = self._named, self.averager
        require_equal_on_all_ranks(
            averager.context,
            f"{_NAME} needs gradients in the same order on all ranks",
            describe_ready_order(self._gradient_counts, [name for name, _ in named]),
        )
        unused = [index for index in range(len(named)) if index not in self._gradient_counts]
        parts = [list(self._gradient_counts), unused]
        self.copies.find(named)
        kinds = self.copies.kinds([name for name, _ in named])
        buckets = build_buckets(named, parts, self._updates, averager.tensor_factory, kinds)
        for bucket in buckets:
            if self.restore is not None:
                self.restore(bucket)
            self._bucket_of.update(dict.fromkeys(bucket.members, bucket))
        self.buckets, self.restore = buckets, None
        self._register_buckets()

    @override
    def repair_buckets(self) -> bool:
        return True  # they are when a bucket is sent

    def _register_buckets(self) -> None:
        """Pass the buckets to the averager; collective."""
        self.averager.set_buckets(
            [AveragedBucket(one.index, one.flat, one.layout, one.optimizer) for one in self.buckets]
        )
        if not self._sync:
            self.reset()

    # around steps

    @override
    def wait_for_reads(self) -> None:
        self._rounds.wait()

    @override
    def conclude(self) -> None:
        """Write all pending averages, before their step."""
        current = self._rounds.current
        if self._sync and current is not None:
            for bucket in self.buckets:
                if current.has_started(bucket.index):
                    self._average(bucket)

    @override
    def reset(self, *, averaged: bool = False) -> None:
        """Restart after the parameters got new values, ``averaged`` if equal; collective."""
        self.wait_for_reads()
        self._rounds.current, self._averaged = None, set()
        if self._sync and averaged:
            self._averaged = {bucket.index for bucket in self.buckets}
        if not self._sync and self.buckets and not self.averager.single_rank:
            for bucket in self.buckets:
                bucket.pack()
            sent = self.averager.windows.publish_to_all(self.averager.round + 1)
            self.averager.bytes_sent += sent

    @override
    def close(self) -> None:
        self._rounds()
        self._rounds.current = None
        with suppress(PeerError, NotInitializedError):
            self.averager.windows.free()


class _PendingRounds:
    """Averaging rounds in progress, for whose messages the rank waits before it exits.

    A rank must not leave the world before its neighbours have received its messages.
    """

    def __init__(self, owner: BackwardAveragingPhase) -> None:
        self.current: AveragingRound | None = None
        """Round of the current step, or of the next step between steps."""
        self.following: AveragingRound | None = None
        """Round of the step after that."""
        self._owner: ReferenceType[BackwardAveragingPhase] = ref(owner)
        callbacks = owner.averager.context.exit_callbacks
        callbacks[:] = [c for c in callbacks if not (isinstance(c, _PendingRounds) and c.is_over)]
        callbacks.append(self)

    def _pending(self) -> list[AveragingRound]:
        return [one for one in (self.current, self.following) if one is not None]

    @property
    def is_over(self) -> bool:
        """True if the owner was deleted and all messages have arrived."""
        return self._owner() is None and all([one.is_complete for one in self._pending()])

    def wait(self) -> None:
        """Wait until messages and peers have finished reading the buckets."""
        for one in self._pending():
            one.wait_for_reads()

    def __call__(self) -> None:
        """Wait for all messages that can still arrive, ignoring errors."""
        with suppress(PeerError, NotInitializedError):
            self.wait()
