"""Averaging rounds by messages, in which averaging ranks wait for each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received, ReceivedAverage
from asyncddp.algorithms.join_coordinator import JoinCollectiveKind
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.rounds.averaging_round import (
    AveragerState,
    AveragingRound,
    BeforeWrite,
    BucketExchange,
)
from asyncddp.algorithms.rounds.received_messages import ReceivedMessages
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import UsageError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_allreduce import hierarchical_allreduce_nonblocking
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors_nonblocking
from asyncddp.ops.uneven_inputs import average_active_ranks_nonblocking
from asyncddp.ops.unordered_average import unordered_average_nonblocking
from asyncddp.ops.weighted_average import WeightResolver
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.topology import Schedule

_NO_STATES: Mapping[str, torch.Tensor] = MappingProxyType({})


class MessageRound(AveragingRound):
    """Base class of averaging rounds by messages, in which averaging ranks wait for each other.

    A bucket is averaged by a verb, such as allreduce, with tensors of its state. A compressor
    encodes the parameters; the rest, such as flags, is sent uncompressed. Methods that send
    differences get the encoded tensor of each neighbour separately.

    Attributes:
        row: This rank's weights, if it averages with neighbours.
        leads: Whether this rank itself exchanges with others.
        copies_sent: Number of copies of a bucket that this rank sends, for counting bytes.
        parts: Equal parts in which a compressed bucket is encoded.
        sums: Whether an uncompressed bucket is sent in its accumulation dtype.
        splits: Whether buckets are sent in pieces.
    """

    supports_join = False
    row: WeightRow | None = None
    leads = True
    copies_sent: float = 0
    parts = 1
    sums: ClassVar[bool] = True
    splits: ClassVar[bool] = False

    def __init__(
        self, averager: AveragerState, number: int, active: Collection[int] | None = None
    ) -> None:
        super().__init__(averager, number)
        self._active = active
        self._at_once: list[int] = []
        self._plan()

    @abstractmethod
    def _plan(self) -> None:
        """Set this rank's weights and number of copies to send in the round."""

    @classmethod
    def of(
        cls, averager: AveragerState, number: int, active: Collection[int] | None = None
    ) -> MessageRound:
        """Make round ``number``, among the ``active`` ranks inside ``join``."""
        return cls(averager, number, active)

    @override
    @classmethod
    def begin(cls, averager: AveragerState, number: int) -> AveragingRound | None:
        active: Collection[int] | None = None
        if averager.join_coordinator is not None:
            active = averager.join_coordinator.notify(
                averager.label, JoinCollectiveKind.AVERAGING_ROUND
            )
            if len(active) == averager.context.size:
                active = None
        changed = averager.enter_view(number)
        begun = cls.of(averager, number, active)
        begun._restart(changed=changed)
        return begun

    def _restart(self, *, changed: bool = False) -> None:
        """Reset the method's state if the set of participating ranks has changed."""
        if self._active is not None and not self.supports_join:
            raise UsageError(
                f"join: {self.name} needs all ranks in every round; expected a communication that "
                "can go on without those that are done, such as neighbor_allreduce or allreduce"
            )
        self._averager.restart_if_changed(self._active, self.row, changed=changed)

    @override
    @classmethod
    def row_of_round(cls, averager: AveragerState, number: int) -> WeightRow | None:
        one = cls.of(averager, number)
        return one.row if one.leads else None

    @override
    @classmethod
    def shadow_round(cls, averager: AveragerState, active_ranks: Sequence[int]) -> None:
        one, method = cls.of(averager, averager.round, active_ranks), averager.algorithm
        one._restart()
        averager.number_buckets(averager.round)
        exchanges = []
        with use(averager.context), torch.no_grad():
            for index, name, flat in averager.pieces(split=one.splits):
                bucket = averager.buckets[index]
                if not method.takes_part(bucket):
                    continue
                bucket.row, bucket.joined = one.row, True
                sent = method.outgoing(bucket) if one._asks_joined else flat
                along = method.travelling_state(bucket)
                exchanges.append((bucket, one._exchange(bucket, sent, along, name)))
            for bucket, exchange in exchanges:
                received = exchange.wait()
                if received is not None and method.joined_ranks is not JoinedRanks.LEAVE:
                    method.incoming(bucket, received)
                bucket.joined = False
        averager.end_round()

    @property
    def _asks_joined(self) -> bool:
        """True if the method computes the tensors that a joined rank sends."""
        method = self._averager.algorithm
        if method.compression is CompressionUse.DIFFERENCES:
            return method.joined_ranks is JoinedRanks.RELAY
        return not (method.plain or method.replicates_model)

    # a bucket

    @abstractmethod
    def _average(self, tensor: torch.Tensor, **options: Any) -> Handle[torch.Tensor]:
        """Start averaging a tensor; options are a verb's ``name``, ``compression`` and ``out``."""

    def _fast_path(self, flat: torch.Tensor, name: str) -> Callable[[], bool] | None:
        """Return a blocking function that averages a tensor in place; None if there is none.

        It exists if neighbours read each other's memory, where starting early gains nothing.
        """
        return None

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        averager, name = self._averager, self._averager.bucket_name(bucket.index)
        method = averager.algorithm
        plain = method.plain and bucket.compressor is None
        if plain and not averager.overlapping:
            fast_path = self._fast_path(bucket.flat, name)
            if fast_path is not None:
                self._count(bucket, bucket.flat)
                self._at_once.append(bucket.index)
                return BucketExchange(partial(self._average_at_once, fast_path, bucket.flat, name))
        bucket.row = self.row
        with use(averager.context), torch.no_grad():
            if bucket.compressor is not None:
                bucket.clear_padding()
            sent, along = method.outgoing(bucket), method.travelling_state(bucket)
            in_place = plain and averager.in_place
            return self._exchange(bucket, sent, along, name, in_place=in_place)

    def _average_at_once(
        self, fast_path: Callable[[], bool], flat: torch.Tensor, name: str
    ) -> None:
        if not fast_path():  # it has become unavailable
            with use(self._averager.context):
                self._average(flat, name=name, out=flat).wait()

    @override
    def _before_averages(self, before_write: BeforeWrite | None) -> None:
        for index in self._at_once:  # first, as on all ranks: while they wait, nothing else goes on
            self.finish_bucket(index, before_write)

    def _exchange(
        self,
        bucket: AveragedBucket,
        sent: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        name: str,
        *,
        in_place: bool = False,
    ) -> BucketExchange:
        """Start the exchange of a bucket, with the weights of its ``row`` if it has neighbours."""
        self._count(bucket, sent, states)
        if self._averager.algorithm.compression is CompressionUse.DIFFERENCES and bucket.row:
            return self._exchange_messages(bucket, bucket.row, sent, name)
        codec, numel = bucket.compressor, bucket.payload.numel()
        if codec is None:
            out = {"out": sent} if in_place else {}
            handles = [self._average(sent, name=name, **out)]
        elif numel == sent.numel():
            handles = [self._average(sent, name=name, compression=codec)]
        else:
            payload, tail = sent[:numel], sent[numel:]
            handles = [
                self._average(payload, name=name, compression=codec, out=payload),
                self._average(tail, name=f"{name}.tail", out=tail),
            ]
        count = len(handles)
        handles += [self._average(one, name=f"{name}.{key}") for key, one in states.items()]

        def wait() -> Received:
            results = [handle.wait() for handle in handles]
            received = ReceivedAverage(results[0] if count == 1 else sent)
            received.states = dict(zip(states, results[count:], strict=True))
            return received

        return BucketExchange(wait, handles)

    def _exchange_messages(
        self, bucket: AveragedBucket, row: WeightRow, sent: torch.Tensor, name: str
    ) -> BucketExchange:
        """Start the exchange of encoded tensors that the method gets separately."""
        to_each = self._averager.algorithm.outgoing_to_each(bucket, sent)
        handle = exchange_with_neighbors_nonblocking(
            sent,
            row,
            bucket.compressor,
            name=name,
            describe=lambda: bucket.describe_not_finite(sent),
            to_each=to_each,
        )

        def wait() -> Received:
            tensors = handle.wait()
            here = row.without([peer for peer in row.sources if peer not in tensors.received])
            bucket.row = here  # without ranks that have left meanwhile
            received = ReceivedMessages(here, bucket.compressor, sent, tensors)
            received.sent_to_each = to_each or {}
            return received

        return BucketExchange(wait, [handle])

    def _count(
        self,
        bucket: AveragedBucket,
        sent: torch.Tensor,
        states: Mapping[str, torch.Tensor] = _NO_STATES,
    ) -> None:
        """Count the bytes that this rank sends for a bucket and its state."""
        travels = DTYPES[sent.dtype].accumulate if self.sums else sent.dtype
        message = bucket.message_bytes(self.parts, sent, travels)
        along = sum(state.nbytes for state in states.values())
        self._averager.bytes_sent += round(self.copies_sent * (message + along))

    def _resolved_row(self, schedule: Schedule, place: int) -> WeightRow:
        """Return the weights that the user has set, or else the schedule's for a node."""
        given = self.relevant_overrides(self._averager.overrides)
        number = self._number
        return WeightResolver(self.name, schedule, place, given, number).row_at(number)


class AllreduceRound(MessageRound):
    """Averaging round over all ranks (allreduce); ranks that have run out of data add zeros."""

    name = "allreduce"
    how = CommunicationPattern.GLOBAL
    supports_join = True

    @override
    def _plan(self) -> None:
        size = self._averager.context.size
        self.copies_sent, self.parts = 2 * (size - 1) / size, size

    @override
    def _average(self, tensor: torch.Tensor, **options: Any) -> Handle[torch.Tensor]:
        method = self._averager.algorithm
        if self._active is not None:
            return average_active_ranks_nonblocking(tensor, self._active, method.average, **options)
        if method.when is CommunicationTiming.INTERVAL:  # ranks may call collectives in between
            return unordered_average_nonblocking(tensor, **options)
        return allreduce_nonblocking(tensor, average=method.average, **options)


class HierarchicalAllreduceRound(MessageRound):
    """Averaging round over all ranks, in which only one rank per machine uses the network."""

    name = "hierarchical_allreduce"
    how = CommunicationPattern.GLOBAL

    @override
    def _plan(self) -> None:
        context, machines = self._averager.context, self._averager.context.machine_size
        self.copies_sent = 2 * (machines - 1) / machines if context.local_rank == 0 else 0.0
        self.parts = machines

    @override
    def _average(self, tensor: torch.Tensor, **options: Any) -> Handle[torch.Tensor]:
        average = self._averager.algorithm.average
        return hierarchical_allreduce_nonblocking(tensor, average, **options)
