"""Averaging rounds: each rank sends its buckets of tensors, then writes the averages into them."""

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
from asyncddp.algorithms.rounds.communication_buffer import CommunicationBuffer
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors
from asyncddp.ops.weighted_average import Weights
from asyncddp.topology import Schedule


@dataclass
class WeightOverrides:
    """Averaging weights that the user sets in place of the topology's; None keeps those."""

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None


class BucketPiece(NamedTuple):
    """Piece of a bucket that travels by itself: index of the bucket, name, and view of its flat."""

    bucket: int
    name: str
    flat: torch.Tensor


class CrossRoundState:
    """State that the averaging rounds of one optimizer share: windows, weights and counters.

    Attributes:
        buckets: The flat buckets that rounds average.
        schedule: The optimizer's own topology; None for the context's.
        round: Rounds completed so far, which is the index of the schedule's next round.
        bytes_sent: Payload bytes sent to peers so far.
        exposed_time: Time that rounds took on the caller's thread, to send, wait and average.
        join_coordinator: Agrees on the active ranks before each round, inside ``join``.
        force_barrier: Whether ranks synchronise before and after they average from windows.
        max_staleness: How many steps a neighbour may lag before this rank waits for it.
        overlapping: Whether a round starts before the last one is complete, so that ranks may
            finish its buckets in different orders.
        in_place: Whether averages may be written as soon as messages have arrived, since nobody
            else reads the buckets from the start of a round to its end.
        buffer: Limit on the memory of messages and ring buffers; None for no limit.
        piece_bytes: Bytes of the pieces in which buckets travel; None where they travel whole.
    """

    def __init__(self, context: Context, algorithm: Algorithm, label: str) -> None:
        self.context, self.algorithm, self.label = context, algorithm, label
        self.overrides = WeightOverrides()
        self.buckets: Sequence[AveragedBucket] = ()
        self.schedule: Schedule | None = None
        self.round = 0
        self.bytes_sent = 0
        self.exposed_time = CumulativeTimer()
        self.join_coordinator: JoinCoordinator | None = None
        self.windows = BucketWindowSet(context, label, algorithm)
        self.force_barrier = False
        self.max_staleness: int | None = None
        self.overlapping = self.in_place = False
        self.buffer: CommunicationBuffer | None = None
        self.piece_bytes: int | None = None
        self._training: Collection[int] | None = None

    def restart_if_changed(self, training: Collection[int] | None, row: WeightRow | None) -> None:
        """Let the method begin anew where other ranks take part than in the last round.

        Args:
            training: The ranks that take part, where some do not; None for all.
            row: This rank's weights among them, where it averages with neighbours.
        """
        if training != self._training:
            self._training = training
            with torch.no_grad():
                for bucket in self.buckets:
                    bucket.row = row or WeightRow(1.0, {}, {})
                    exchange = partial(self.tensors_of_neighbors, bucket)
                    self.algorithm.restart(bucket, NeighborTensors(bucket, exchange))

    def tensors_of_neighbors(
        self, bucket: AveragedBucket, tensor: torch.Tensor
    ) -> Mapping[int, torch.Tensor]:
        """Send a tensor as it is to the neighbours of ``bucket.row``; return theirs, by rank.

        It belongs to no round, and is not counted in ``bytes_sent``.
        """
        row = bucket.row
        if row is None:
            return {}
        name = f"{self.bucket_name(bucket.index)}.state"
        with use(self.context), torch.no_grad():
            return exchange_with_neighbors(tensor, row, None, name=name).received

    def end_round(self) -> None:
        """Count a round, once all its averages are written."""
        self.round += 1

    def continue_totals(self, before: CrossRoundState) -> None:
        """Go on adding up bytes and time where another state's rounds have ended."""
        self.bytes_sent += before.bytes_sent
        self.exposed_time = before.exposed_time

    def number_buckets(self, number: int, steps: int = 0) -> None:
        """Tell the buckets the index of the last round that has begun, and the steps since then."""
        for bucket in self.buckets:
            bucket.round, bucket.steps = number, steps

    def pieces(self, *, split: bool = True) -> list[BucketPiece]:
        """List what travels by itself in a round, in an order that is the same on all ranks."""
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
        """Name of the messages of a bucket that travels whole."""
        return f"{self.label}.bucket{index}"

    @property
    def schedule_of_ranks(self) -> Schedule:
        """Topology of ranks that is in use."""
        return self.schedule or self.context.topologies.ranks


BeforeWrite: TypeAlias = Callable[[int], None]
"""Called with the index of each bucket before its average is written."""


class BucketExchange:
    """Exchange of one bucket in progress.

    Args:
        wait: Waits for the exchange, and returns what the method gets; None where the averages are
            in the bucket already.
        handles: Handles of its messages, which read the bucket.
    """

    __slots__ = ("handles", "wait")

    def __init__(
        self, wait: Callable[[], Received | None], handles: Sequence[Handle[Any]] = ()
    ) -> None:
        self.wait, self.handles = wait, handles


class AveragingRound(ABC):
    """Averaging round in progress (base class): sends each bucket, then writes the averages.

    Each subclass is one way in which ranks average. Methods that wait raise a PeerError where a
    neighbour failed, or does something else.

    Attributes:
        how: The pattern that an algorithm must allow for it; None for any algorithm.
        supports_join: Whether rounds can go on without ranks that have joined (are done).
        asynchronous: Whether each rank goes on at its own pace, and waits for none in a round.
        nodes: What the nodes of its topology are; None if it uses no topology.
        override_names: Names of the weight overrides that it uses.
    """

    name: ClassVar[str]
    how: ClassVar[CommunicationPattern | None]
    supports_join: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    nodes: ClassVar[Literal["ranks", "machines"] | None] = None
    override_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, averager: CrossRoundState, number: int) -> None:
        self._averager, self._number = averager, number
        self._started: dict[int, BucketExchange] = {}

    @classmethod
    def relevant_overrides(
        cls, overrides: WeightOverrides
    ) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Select the weight overrides that it uses, by argument name."""
        return {name: getattr(overrides, name) for name in cls.override_names}

    @classmethod  # noqa: B027 - optional hook
    def prepare(cls, averager: CrossRoundState) -> None:
        """Make what rounds need for the averager's buckets; collective."""

    @classmethod
    def begin(cls, averager: CrossRoundState, number: int) -> AveragingRound | None:
        """Begin round ``number`` of an averager; returns None where nothing is to be sent."""
        return cls(averager, number)

    @classmethod
    def row_of_round(cls, averager: CrossRoundState, number: int) -> WeightRow | None:
        """Return this rank's weights of a round; None if it exchanges with no neighbours."""
        return None

    @classmethod  # noqa: B027 - optional hook
    def shadow_round(cls, averager: CrossRoundState, active_ranks: Sequence[int]) -> None:
        """Take part in a round of the active ranks on a joined rank, whose buckets stay unchanged.

        A no-op where no rank waits for a joined one.
        """

    @abstractmethod
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        """Start the exchange of a bucket, and count the bytes sent."""

    def _before_averages(self, before_write: BeforeWrite | None) -> None:  # noqa: B027 - optional hook
        """Do what comes before the averages of all buckets are written."""

    def _after_averages(self) -> None:  # noqa: B027 - optional hook
        """Do what comes after that."""

    def start(self, index: int) -> None:
        """Send bucket ``index`` if it takes part; it must not change until it is finished."""
        averager = self._averager
        bucket = averager.buckets[index]
        if averager.algorithm.takes_part(bucket):
            with averager.exposed_time:
                self._started[index] = self._send(bucket)

    def has_started(self, index: int) -> bool:
        """Return whether bucket ``index`` was sent, and its average not written yet."""
        return index in self._started

    def leave_out_departed(self) -> None:  # noqa: B027 - only one-sided rounds need it
        """Move the weights of neighbours that have left the averaging to this rank."""

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a bucket any more; averages are kept."""
        with self._averager.exposed_time:
            for exchange in self._started.values():
                for handle in exchange.handles:
                    handle.wait()

    @property
    def is_complete(self) -> bool:
        """True if no message or peer reads a bucket any more."""
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
        """List the started buckets in the order in which their averages are written."""
        return list(self._started)


class LocalRound(AveragingRound):
    """Averaging round of a rank that averages with nobody: W is one."""

    name = "empty"
    how = None

    @override
    @classmethod
    def begin(cls, averager: CrossRoundState, number: int) -> AveragingRound | None:
        return cls(averager, number) if averager.algorithm.changes_alone else None

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        method = self._averager.algorithm
        with torch.no_grad():
            received = ReceivedAverage(method.outgoing(bucket))
            received.states = method.travelling_state(bucket)
        return BucketExchange(lambda: received)
