"""Ways to average by messages: with neighbours, between machines, over all ranks, or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaging_round import (
    AveragingRound,
    BucketAveragingFunctions,
    CrossRoundState,
    TwoSidedRound,
)
from asyncddp.algorithms.bucket_exchange import exchange_of
from asyncddp.algorithms.communication import Communication
from asyncddp.algorithms.join_coordinator import JoinCollectiveKind
from asyncddp.algorithms.leader_round import LeaderRound
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.piecewise_round import PiecewiseRound
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import UsageError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_allreduce import hierarchical_allreduce_nonblocking
from asyncddp.ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce_nonblocking,
    machine_schedule,
)
from asyncddp.ops.neighbor_allreduce import find_fast_path, neighbor_allreduce_nonblocking
from asyncddp.ops.uneven_inputs import (
    among_active,
    average_active_ranks_nonblocking,
    renormalise,
    skip_round_nonblocking,
)
from asyncddp.ops.unordered_average import unordered_average_nonblocking
from asyncddp.ops.weight_resolver import WeightResolver


class TwoSidedCommunication(Communication):
    """Averaging by messages (base class): the ranks that average wait for each other."""

    supports_join = False
    in_pieces: ClassVar[bool] = False
    """Whether buckets may travel in pieces."""

    @abstractmethod
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        """Plan this rank's part of round ``number``; returns None where nothing is to be sent.

        ``active_ranks`` are given inside ``join``, where some ranks are done.
        """

    @override
    def begin_round(self, averager: CrossRoundState, number: int) -> AveragingRound | None:
        plan, active_ranks = self.plan_round(averager, number), None
        if plan is not None and averager.join_coordinator is not None:
            active_ranks = averager.join_coordinator.notify(
                averager.label, JoinCollectiveKind.AVERAGING_ROUND
            )
            if len(active_ranks) < averager.context.size:
                self._require_join(averager)
                plan = self.plan_round(averager, number, active_ranks)
        if plan is None:
            return None
        averager.restart_if_changed(active_ranks, plan.row)
        if plan.row is not None and averager.buffer is not None and self._splits(averager):
            return PiecewiseRound(averager, plan, plan.row, averager.buffer)
        kind = TwoSidedRound if plan.leads is None else LeaderRound
        return kind(averager, plan)

    def _splits(self, averager: CrossRoundState) -> bool:
        return self.in_pieces and averager.piece_bytes is not None

    @override
    def row_of_round(self, averager: CrossRoundState, number: int) -> WeightRow | None:
        plan = self.plan_round(averager, number)
        return None if plan is None or plan.leads is False else plan.row

    def shadow_round(self, averager: CrossRoundState, active_ranks: Sequence[int]) -> None:
        """Exchange this joined rank's messages of the active ranks' round, and count the round."""
        self._require_join(averager)
        plan, method = self.plan_round(averager, averager.round, active_ranks), averager.algorithm
        if plan is None:
            return
        averager.restart_if_changed(active_ranks, plan.row)
        averager.number_buckets(averager.round)
        exchanges = []
        with use(averager.context), torch.no_grad():
            for index, name, flat in averager.pieces(split=self._splits(averager)):
                bucket = averager.buckets[index]
                if not method.takes_part(bucket):
                    continue
                bucket.row, bucket.joined = plan.row, True
                sent = method.outgoing(bucket) if self._asks_joined(method, plan) else flat
                along = method.travelling_state(bucket)
                exchange = exchange_of(
                    plan.start, method, bucket, sent, along, name, in_place=False
                )
                exchanges.append((bucket, exchange))
                averager.bytes_sent += plan.send_bytes(bucket, sent, along)
            for bucket, exchange in exchanges:
                received = exchange.wait()
                if method.joined_ranks is not JoinedRanks.LEAVE:
                    method.incoming(bucket, received)
                bucket.joined = False
        averager.round += 1

    def _asks_joined(self, method: Algorithm, plan: BucketAveragingFunctions) -> bool:
        """Return whether the method says of what size and dtype the tensors of the round are."""
        if method.compression is CompressionUse.DIFFERENCES:
            return method.joined_ranks is JoinedRanks.RELAY
        return not (method.plain or method.replicates_model)

    def _require_join(self, averager: CrossRoundState) -> None:
        if not self.supports_join:
            raise UsageError(
                f"join: {self.name} needs all ranks in every round; expected a communication that "
                "can go on without those that are done, such as neighbor_allreduce or allreduce"
            )


class NeighborAllreduceCommunication(TwoSidedCommunication):
    """Weighted average with the neighbours in the graph of ranks, by messages.

    Where some ranks have joined, their weights are moved to this rank's own tensor.
    """

    name = "neighbor_allreduce"
    how = CommunicationPattern.NEIGHBORS
    nodes = "ranks"
    override_names = ("self_weight", "src_weights", "dst_weights")
    supports_join = in_pieces = True

    @override
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        if averager.algorithm.averages_all(number):
            return AllreduceCommunication().plan_round(averager, number, active_ranks)
        context, given = averager.context, self.relevant_overrides(averager.overrides)
        schedule, rank, method = averager.schedule_of_ranks, context.rank, averager.algorithm
        uniform, relays = method.needs.uniform, method.joined_ranks is JoinedRanks.RELAY
        joined = active_ranks is not None and rank not in active_ranks
        if joined and not uniform and not relays:
            return BucketAveragingFunctions(skip_round_nonblocking, 0)
        row = WeightResolver(self.name, schedule, rank, given, number).row_at(number)
        if active_ranks is not None and uniform:
            row = among_active(row, rank, active_ranks)
        elif active_ranks is not None and not relays:
            by_columns = method.needs.column_stochastic
            row = renormalise(row, active_ranks, pushed_by=rank if by_columns else None)
        start = partial(
            neighbor_allreduce_nonblocking,
            self_weight=row.self_weight,
            src_weights=row.src_weights,
            dst_weights=row.dst_weights,
        )
        return BucketAveragingFunctions(
            start,
            len(row.dst_weights),
            sums=False,
            row=row,
            fast_path=partial(find_fast_path, context, row),
        )


class HierarchicalNeighborAllreduceCommunication(TwoSidedCommunication):
    """Hierarchical average by messages: mean per machine, weighted average between machines."""

    name = "hierarchical_neighbor_allreduce"
    how = CommunicationPattern.MACHINES
    nodes = "machines"
    override_names = ("self_weight", "src_machine_weights", "dst_machine_weights")

    @override
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        context, given = averager.context, self.relevant_overrides(averager.overrides)
        by_hand = given["dst_machine_weights"] is not None
        schedule = averager.schedule or machine_schedule(context, by_hand=by_hand)
        place, local = context.machine_rank, context.local_size
        row = WeightResolver(self.name, schedule, place, given, number).row_at(number)
        if averager.algorithm.compression is CompressionUse.DIFFERENCES:
            leads = context.local_rank == 0
            between = row.between([members[0] for members in context.machines.members])
            copies = len(between.dst_weights) if leads else 0
            return BucketAveragingFunctions(
                allreduce_nonblocking, copies, sums=False, row=between, leads=leads
            )
        start = partial(
            hierarchical_neighbor_allreduce_nonblocking,
            self_weight=row.self_weight,
            src_machine_weights=row.src_weights,
            dst_machine_weights=row.dst_weights,
        )
        copies = 3 * (local - 1) + len(row.dst_weights)
        return BucketAveragingFunctions(start, copies / local)


class AllreduceCommunication(TwoSidedCommunication):
    """Global average over all ranks (allreduce); ranks that have joined contribute zeros."""

    name = "allreduce"
    how = CommunicationPattern.GLOBAL
    supports_join = True

    @override
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        size = averager.context.size
        average = averager.algorithm.average
        start: Callable[..., Handle[torch.Tensor]] = partial(allreduce_nonblocking, average=average)
        if averager.algorithm.when is CommunicationTiming.INTERVAL:
            start = unordered_average_nonblocking  # ranks may call other collectives in between
        if active_ranks is not None:
            among = average_active_ranks_nonblocking
            start = partial(among, active_ranks=active_ranks, average=average)
        return BucketAveragingFunctions(start, 2 * (size - 1) / size, size)


class HierarchicalAllreduceCommunication(TwoSidedCommunication):
    """Global average over all ranks, in which one rank of each machine uses the network."""

    name = "hierarchical_allreduce"
    how = CommunicationPattern.GLOBAL

    @override
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        machines = averager.context.machine_size
        leads = averager.context.local_rank == 0
        copies = 2 * (machines - 1) / machines if leads else 0.0
        start = partial(hierarchical_allreduce_nonblocking, average=averager.algorithm.average)
        return BucketAveragingFunctions(start, copies, machines)


class NoCommunication(TwoSidedCommunication):
    """Communication of ranks that train alone: nothing is sent."""

    name = "empty"
    how = None
    supports_join = True

    @override
    def plan_round(
        self, averager: CrossRoundState, number: int, active_ranks: Collection[int] | None = None
    ) -> BucketAveragingFunctions | None:
        return None
