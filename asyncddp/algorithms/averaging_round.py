"""Averaging rounds: each rank sends its buckets of tensors, then writes the averages into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.bucket_exchange import BucketExchange, exchange_of
from asyncddp.algorithms.bucket_windows import BucketWindowSet
from asyncddp.algorithms.communication_buffer import CommunicationBuffer
from asyncddp.algorithms.cumulative_timer import CumulativeTimer
from asyncddp.algorithms.join_coordinator import JoinCoordinator
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors
from asyncddp.ops.weight_resolver import Weights
from asyncddp.tensors.dtypes import DTYPES
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
            training: The ranks that take part; None for all.
            row: This rank's weights among them, where it averages with neighbours.
        """
        if training is not None and len(training) == self.context.size:
            training = None
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


class AveragingRound(ABC):
    """Averaging round in progress (base class): sends each bucket, then writes the averages.

    Its methods that wait raise a PeerError where a neighbour failed, or does something else.
    """

    @abstractmethod
    def start(self, index: int) -> None:
        """Send bucket ``index``, which must not change until it is finished."""

    @abstractmethod
    def has_started(self, index: int) -> bool:
        """Return whether bucket ``index`` was sent, and its average not written yet."""

    def leave_out_departed(self) -> None:  # noqa: B027 - only one-sided rounds need it
        """Move the weights of neighbours that have left the averaging to this rank."""

    def wait_for_reads(self) -> None:  # noqa: B027 - of one-sided rounds peers read copies
        """Wait until no message or peer reads a bucket any more."""

    @property
    def is_complete(self) -> bool:
        """True if no message or peer reads a bucket any more."""
        return True

    @abstractmethod
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        """Write the average of one bucket, where rounds overlap."""

    @abstractmethod
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        """Write the averages of all buckets, and end the round."""


@dataclass(frozen=True)
class BucketAveragingFunctions:
    """Functions by which an averaging round averages one bucket and counts the bytes sent.

    Attributes:
        start: Starts averaging a flat tensor; takes the tensor, ``name``, for a bucket that is
            compressed ``compression``, and where the average may replace the tensor ``out``.
        copies_sent: Copies of a bucket that this rank sends, encoded if it is compressed.
        parts: Equal parts in which a compressed bucket is encoded.
        sums: Whether a bucket that is not compressed travels in the dtype in which it is summed.
        row: This rank's weights, where it averages with neighbours.
        leads: Whether this rank exchanges with others itself; None if all ranks do.
        fast_path: Finds a blocking function that averages such a tensor in place, if there is
            one: where neighbours read each other's memory, starting early gains nothing.
    """

    start: Callable[..., Handle[torch.Tensor]]
    copies_sent: float
    parts: int = 1
    sums: bool = True
    row: WeightRow | None = None
    leads: bool | None = None
    fast_path: Callable[[torch.Tensor, str], Callable[[], bool] | None] = lambda flat, name: None

    def send_bytes(
        self,
        bucket: AveragedBucket,
        sent: torch.Tensor,
        states: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> int:
        """Compute the bytes that this rank sends of a bucket, and of its state."""
        travels = DTYPES[sent.dtype].accumulate if self.sums else sent.dtype
        message = bucket.message_bytes(self.parts, sent, travels)
        along = sum(state.nbytes for state in states.values())
        return round(self.copies_sent * (message + along))


class TwoSidedRound(AveragingRound):
    """Averaging round by messages: the ranks that average wait for each other."""

    def __init__(self, averager: CrossRoundState, plan: BucketAveragingFunctions) -> None:
        self._averager, self._plan = averager, plan
        self._pending: dict[int, BucketExchange] = {}
        self._fast_paths: dict[int, Callable[[], bool]] = {}

    def start(self, index: int) -> None:
        """Send a bucket that takes part, or look up the fast path that :meth:`finish` will take."""
        averager, bucket = self._averager, self._averager.buckets[index]
        method, name = averager.algorithm, averager.bucket_name(index)
        if not method.takes_part(bucket):
            return
        plain = method.plain and bucket.compressor is None
        with averager.exposed_time:
            if plain and not averager.overlapping:
                fast_path = self._plan.fast_path(bucket.flat, name)
                if fast_path is not None:
                    averager.bytes_sent += self._plan.send_bytes(bucket, bucket.flat)
                    self._fast_paths[index] = fast_path
                    return
            bucket.row = self._plan.row
            with use(averager.context), torch.no_grad():
                if bucket.compressor is not None:
                    bucket.clear_padding()
                sent, along = method.outgoing(bucket), method.travelling_state(bucket)
                averager.bytes_sent += self._plan.send_bytes(bucket, sent, along)
                in_place = plain and averager.in_place
                self._pending[index] = exchange_of(
                    self._plan.start, method, bucket, sent, along, name, in_place=in_place
                )

    @override
    def has_started(self, index: int) -> bool:
        return index in self._pending or index in self._fast_paths

    @override
    def wait_for_reads(self) -> None:
        with self._averager.exposed_time:
            for exchange in self._pending.values():
                exchange.wait()

    @property
    @override
    def is_complete(self) -> bool:
        return all([exchange.poll() for exchange in self._pending.values()])

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        with averager.exposed_time, torch.no_grad():
            received = self._pending[index].wait()
            if before_write is not None:
                before_write(index)
            averager.algorithm.incoming(averager.buckets[index], received)
        del self._pending[index]

    @override
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        with averager.exposed_time, torch.no_grad():
            for index, fast_path in self._fast_paths.items():
                if before_write is not None:
                    before_write(index)
                if not fast_path():  # it has become unavailable
                    bucket = averager.buckets[index]
                    with use(averager.context):
                        name = averager.bucket_name(index)
                        self._plan.start(bucket.flat, name=name, out=bucket.flat).wait()
        for index in list(self._pending):
            self.finish_bucket(index, before_write)
        averager.round += 1
