"""Base class of averaging rounds: each rank sends its buckets, then writes averages into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received, ReceivedAverage
from asyncddp.algorithms.cumulative_timer import CumulativeTimer
from asyncddp.algorithms.join_coordinator import JoinCoordinator
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.rounds.bucket_windows import BucketWindowSet
from asyncddp.algorithms.rounds.round_memory_limit import RoundMemoryLimit
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.membership import View
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors
from asyncddp.ops.weighted_average import Weights
from asyncddp.topology import Schedule
from asyncddp.topology.builders import TopologyLike


@dataclass
class WeightOverrides:
    """Averaging weights that the user has set in place of the topology's; None where unset."""

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None


class BucketPiece(NamedTuple):
    """Piece of a bucket that is sent separately: index of the bucket, message name, and tensor."""

    bucket: int
    name: str
    flat: torch.Tensor


class AveragerState:
    """State shared by all averaging rounds of one optimizer: windows, weights and counters.

    Attributes:
        buckets: The flat buckets that rounds average.
        schedule: The optimizer's own topology; None for the context's.
        source: The same as it was given: perhaps a name, or a function of the number of ranks.
        round: Number of completed rounds, which is the index of the schedule's next round.
        bytes_sent: Payload bytes sent to peers so far.
        exposed_time: Time that rounds took in the caller's thread, to send, wait and average.
        join_coordinator: Agrees on the active ranks before each round, inside ``join``.
        force_barrier: Whether ranks synchronise before and after they average from windows.
        max_staleness: Number of steps that a neighbour may lag before this rank waits for it.
        overlapping: Whether a round starts before the last one is complete, so that ranks may
            finish its buckets in different orders.
        in_place: Whether averages may be written as soon as messages have arrived, since nothing
            else reads the buckets from the start of a round to its end.
        buffer: Limit on the memory of messages and ring buffers; None for no limit.
        piece_bytes: Size of the pieces in which buckets are sent; None to send them whole.
    """

    def __init__(self, context: Context, algorithm: Algorithm, label: str) -> None:
        self.context, self.algorithm, self.label = context, algorithm, label
        self.overrides = WeightOverrides()
        self.buckets: Sequence[AveragedBucket] = ()
        self.schedule: Schedule | None = None
        self.source: TopologyLike | None = None
        self.round = 0
        self.bytes_sent = 0
        self.exposed_time = CumulativeTimer()
        self.join_coordinator: JoinCoordinator | None = None
        self.windows = BucketWindowSet(context, label, algorithm)
        self.force_barrier = False
        self.max_staleness: int | None = None
        self.overlapping = self.in_place = False
        self.buffer: RoundMemoryLimit | None = None
        self.piece_bytes: int | None = None
        self._training: Collection[int] | None = None
        # of the last round that has begun, if the run is elastic
        self.view: View | None = context.view_alone
        self._of_view: tuple[View, Schedule] | None = (
            None  # the optimizer's topology in a later one
        )

    def restart_if_changed(
        self, training: Collection[int] | None, row: WeightRow | None, *, changed: bool = False
    ) -> None:
        """Reset the method's state if the set of participating ranks has changed.

        Args:
            training: The participating ranks; None for all.
            row: This rank's weights for them, if it averages with neighbours.
            changed: Whether other ranks are members of the run than in the round before.
        """
        if changed or training != self._training:
            self._training = training
            with torch.no_grad():
                for bucket in self.buckets:
                    if changed and self.view is not None:
                        bucket.nodes = len(self.view.members)
                    bucket.row = row or WeightRow(1.0, {}, {})
                    exchange = partial(self.tensors_of_neighbors, bucket)
                    self.algorithm.restart(bucket, NeighborTensors(bucket, exchange))

    def tensors_of_neighbors(
        self, bucket: AveragedBucket, tensor: torch.Tensor
    ) -> Mapping[int, torch.Tensor]:
        """Exchange a tensor with the neighbours of ``bucket.row`` uncompressed; return theirs.

        The result is keyed by rank; of one that has left meanwhile it is this rank's own tensor.
        The exchange belongs to no round, and is not counted in ``bytes_sent``.
        """
        row = bucket.row
        if row is None:
            return {}
        name = f"{self.bucket_name(bucket.index)}.state"
        with use(self.context), torch.no_grad():
            received = exchange_with_neighbors(tensor, row, None, name=name).received
        return {peer: received.get(peer, tensor) for peer in row.sources}

    def end_round(self) -> None:
        """Count a completed round, after all its averages are written."""
        self.round += 1

    def continue_totals(self, before: AveragerState) -> None:
        """Take over the totals of bytes and time of another state."""
        self.bytes_sent += before.bytes_sent
        self.exposed_time = before.exposed_time

    def number_buckets(self, number: int, steps: int = 0) -> None:
        """Set the index of the last begun round in all buckets, and the steps since then."""
        for bucket in self.buckets:
            bucket.round, bucket.steps = number, steps

    def pieces(self, *, split: bool = True) -> list[BucketPiece]:
        """List the separately sent pieces of a round, in the same order on all ranks."""
        size = self.piece_bytes
        if size is None or not split:
            return [
                BucketPiece(bucket.index, self.bucket_name(bucket.index), bucket.flat)
                for bucket in self.buckets
            ]
        return [
            BucketPiece(bucket.index, f"{self.label}.piece", piece)
            for bucket in reversed(self.buckets)
            for piece in torch.split(bucket.flat, size // bucket.flat.itemsize)
        ]

    def bucket_name(self, index: int) -> str:
        """Return the message name of a bucket that is sent whole."""
        return f"{self.label}.bucket{index}"

    @property
    def schedule_of_ranks(self) -> Schedule:
        """Topology of ranks in use."""
        topologies, view = self.context.topologies, self.view
        if self.schedule is None:
            return topologies.ranks if view is None else topologies.of_view(view)
        if view is None or view.number == 0:
            return self.schedule
        if self._of_view is None or self._of_view[0] is not view:
            source = self.schedule if self.source is None else self.source
            self._of_view = view, topologies.among(view.members, source)
        return self._of_view[1]

    def enter_view(self, number: int) -> bool:
        """Enter the view to which a round belongs; return whether the members have changed."""
        view = self.context.engine.begin_round(f"rounds of {self.label}", number)
        before, self.view = self.view, view
        return before is not None and before is not view


BeforeWrite: TypeAlias = Callable[[int], None]
"""Called with the index of each bucket before its average is written."""


class BucketExchange:
    """Exchange of one bucket in progress: function that waits for it, and message handles.

    Args:
        wait: Waits for the exchange, and returns the result for the method; None if the averages
            are in the bucket already.
        handles: Handles of its messages, which read the bucket.
    """

    __slots__ = ("handles", "wait")

    def __init__(
        self, wait: Callable[[], Received | None], handles: Sequence[Handle[Any]] = ()
    ) -> None:
        self.wait, self.handles = wait, handles


class AveragingRound(ABC):
    """Base class of averaging rounds in progress: send each bucket, then write the averages.

    Each subclass is one way in which ranks average. Methods that wait raise a PeerError if a
    neighbour has failed, or calls something else.

    Attributes:
        how: The pattern that an algorithm must allow for it; None for any algorithm.
        supports_join: Whether rounds can continue without ranks that have joined (are done).
        asynchronous: Whether ranks do not wait for each other in a round.
        nodes: Kind of the nodes of its topology; None if it uses no topology.
        override_names: Names of the weight overrides that it uses.
    """

    name: ClassVar[str]
    how: ClassVar[CommunicationPattern | None]
    supports_join: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    nodes: ClassVar[Literal["ranks", "machines"] | None] = None
    override_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, averager: AveragerState, number: int) -> None:
        self._averager, self._number = averager, number
        self._started: dict[int, BucketExchange] = {}

    @classmethod
    def relevant_overrides(
        cls, overrides: WeightOverrides
    ) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Select the weight overrides that this kind of round uses, by argument name."""
        return {name: getattr(overrides, name) for name in cls.override_names}

    @classmethod  # noqa: B027 - optional hook
    def prepare(cls, averager: AveragerState) -> None:
        """Create the resources that rounds need for the averager's buckets; collective."""

    @classmethod
    def begin(cls, averager: AveragerState, number: int) -> AveragingRound | None:
        """Begin round ``number`` of an averager; None if there is nothing to send."""
        return cls(averager, number)

    @classmethod
    def row_of_round(cls, averager: AveragerState, number: int) -> WeightRow | None:
        """Return this rank's weights in a round; None if it has no neighbours to exchange with."""
        return None

    @classmethod  # noqa: B027 - optional hook
    def shadow_round(cls, averager: AveragerState, active_ranks: Sequence[int]) -> None:
        """Take part in a round of the active ranks as a joined rank, without changing buckets.

        Does nothing if no rank waits for joined ranks.
        """

    @abstractmethod
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        """Start the exchange of a bucket, and count the bytes sent."""

    def _before_averages(self, before_write: BeforeWrite | None) -> None:  # noqa: B027 - optional hook
        """Run before the averages of all buckets are written."""

    def _after_averages(self) -> None:  # noqa: B027 - optional hook
        """Run after the averages of all buckets are written."""

    def start(self, index: int) -> None:
        """Send bucket ``index`` if it takes part; it must not change before it is finished."""
        averager = self._averager
        bucket = averager.buckets[index]
        if averager.algorithm.takes_part(bucket):
            with averager.exposed_time:
                self._started[index] = self._send(bucket)

    def has_started(self, index: int) -> bool:
        """Return whether bucket ``index`` was sent and its average is not written yet."""
        return index in self._started

    def leave_out_departed(self) -> None:  # noqa: B027 - only one-sided rounds need it
        """Move the weights of departed neighbours to this rank."""

    def wait_for_reads(self) -> None:
        """Wait until messages and peers have finished reading the buckets; keep the averages."""
        with self._averager.exposed_time:
            for exchange in self._started.values():
                for handle in exchange.handles:
                    handle.wait()

    @property
    def is_complete(self) -> bool:
        """True if messages and peers have finished reading the buckets."""
        handles = [handle for one in self._started.values() for handle in one.handles]
        return all([handle.poll() for handle in handles])

    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        """Write the average of one bucket."""
        averager = self._averager
        with averager.exposed_time, torch.no_grad():
            if before_write is not None:
                before_write(index)
            received = self._started[index].wait()
            if received is not None:
                averager.algorithm.incoming(averager.buckets[index], received)
        del self._started[index]

    def finish(self, before_write: BeforeWrite | None = None) -> None:
        """Write the averages of all buckets, and end the round."""
        self._before_averages(before_write)
        for index in self._order():
            self.finish_bucket(index, before_write)
        self._after_averages()
        self._averager.end_round()

    def _order(self) -> list[int]:
        """List the started buckets, in the order of writing their averages."""
        return list(self._started)


class LocalRound(AveragingRound):
    """Averaging round of a single rank, without communication."""

    name = "empty"
    how = None

    @override
    @classmethod
    def begin(cls, averager: AveragerState, number: int) -> AveragingRound | None:
        return cls(averager, number) if averager.algorithm.changes_alone else None

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        method = self._averager.algorithm
        with torch.no_grad():
            received = ReceivedAverage(method.outgoing(bucket))
            received.states = method.travelling_state(bucket)
        return BucketExchange(lambda: received)
