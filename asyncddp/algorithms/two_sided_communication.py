"""Ways to average by messages: with neighbours, between machines, over all ranks, or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import CommunicationPattern
from asyncddp.algorithms.averaging_round import (
    AveragingRound,
    BucketAveragingFunctions,
    SharedRoundState,
    TwoSidedRound,
)
from asyncddp.algorithms.communication import Communication
from asyncddp.algorithms.join_coordinator import JoinCollectiveKind
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import UsageError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_neighbor_allreduce import (
    hierarchical_neighbor_allreduce_nonblocking,
    machine_schedule,
)
from asyncddp.ops.neighbor_allreduce import find_fast_path, neighbor_allreduce_nonblocking
from asyncddp.ops.uneven_inputs import (
    average_active_ranks_nonblocking,
    renormalise,
    skip_round_nonblocking,
)
from asyncddp.ops.weight_resolver import WeightResolver
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.dtypes import DTYPES
from topology import Schedule


class TwoSidedCommunication(Communication):
    """Averaging by messages (base class): the ranks that average wait for each other."""

    supports_join = False

    @abstractmethod
    def plan_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> BucketAveragingFunctions | None:
        """Plan this rank's part of round ``number``; returns None where nothing is to be sent."""

    def plan_partial_round(
        self, averager: SharedRoundState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketAveragingFunctions | None:
        """Plan this rank's part of the next round inside ``join``, where some ranks are done."""
        raise UsageError(
            f"join: {self.name} needs all ranks in every round; expected a communication that "
            "can go on without those that are done, such as neighbor_allreduce or allreduce"
        )

    def begin_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> AveragingRound | None:
        """Begin a round of messages; inside ``join`` only among the active ranks."""
        plan = self.plan_round(averager, schedule, number)
        if plan is not None and averager.join_coordinator is not None:
            active_ranks = averager.join_coordinator.notify(
                averager.label, JoinCollectiveKind.AVERAGING_ROUND
            )
            if len(active_ranks) < averager.context.size:
                plan = self.plan_partial_round(averager, schedule, active_ranks)
        return None if plan is None else TwoSidedRound(averager, plan)

    def shadow_round(
        self, averager: SharedRoundState, flats: Sequence[torch.Tensor], active_ranks: Sequence[int]
    ) -> None:
        """Exchange this joined rank's messages of the active ranks' round, and count the round."""
        plan = self.plan_partial_round(averager, None, active_ranks)
        if plan is None:
            return
        with use(averager.context), torch.no_grad():
            handles = [
                plan.start(flat, name=f"{averager.label}.bucket{index}")
                for index, flat in enumerate(flats)
            ]
        for handle in handles:
            handle.wait()
        averager.bytes_sent += sum(map(plan.send_bytes, flats))
        averager.round += 1


class NeighborAllreduceCommunication(TwoSidedCommunication):
    """Weighted average with the neighbours in the graph of ranks, by messages.

    Where some ranks have joined, their weights are moved to this rank's own tensor.
    """

    name = "neighbor_allreduce"
    how = CommunicationPattern.NEIGHBORS
    nodes = "ranks"
    override_names = ("self_weight", "src_weights", "dst_weights")
    supports_join = True

    @override
    def plan_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> BucketAveragingFunctions | None:
        return self._plan(averager.context, self._row(averager, schedule, number))

    @override
    def plan_partial_round(
        self, averager: SharedRoundState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketAveragingFunctions | None:
        if averager.context.rank not in active_ranks:
            return BucketAveragingFunctions(skip_round_nonblocking, lambda flat: 0)
        row = renormalise(self._row(averager, schedule, averager.round), active_ranks)
        return self._plan(averager.context, row)

    def _row(self, averager: SharedRoundState, schedule: Schedule | None, number: int) -> WeightRow:
        given, rank = self.relevant_overrides(averager.overrides), averager.context.rank
        schedule = schedule or averager.context.topologies.ranks
        return WeightResolver(self.name, schedule, rank, given, number).row_at(number)

    def _plan(self, context: Context, row: WeightRow) -> BucketAveragingFunctions:
        start = partial(
            neighbor_allreduce_nonblocking,
            self_weight=row.self_weight,
            src_weights=row.src_weights,
            dst_weights=row.dst_weights,
        )
        return BucketAveragingFunctions(
            start,
            lambda flat: len(row.dst_weights) * flat.nbytes,
            partial(find_fast_path, context, row),
        )


class HierarchicalNeighborAllreduceCommunication(TwoSidedCommunication):
    """Hierarchical average by messages: mean per machine, weighted average between machines."""

    name = "hierarchical_neighbor_allreduce"
    how = CommunicationPattern.MACHINES
    nodes = "machines"
    override_names = ("self_weight", "src_machine_weights", "dst_machine_weights")

    @override
    def plan_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> BucketAveragingFunctions | None:
        context, given = averager.context, self.relevant_overrides(averager.overrides)
        by_hand = given["dst_machine_weights"] is not None
        schedule = schedule or machine_schedule(context, by_hand=by_hand)
        place, local = context.machine_rank, context.local_size
        row = WeightResolver(self.name, schedule, place, given, number).row_at(number)
        start = partial(
            hierarchical_neighbor_allreduce_nonblocking,
            self_weight=row.self_weight,
            src_machine_weights=row.src_weights,
            dst_machine_weights=row.dst_weights,
        )
        copies = 3 * (local - 1) + len(row.dst_weights)
        return BucketAveragingFunctions(
            start, lambda flat: round(copies * _summed_bytes(flat) / local)
        )


class AllreduceCommunication(TwoSidedCommunication):
    """Global average over all ranks (allreduce); ranks that have joined contribute zeros."""

    name = "allreduce"
    how = CommunicationPattern.GLOBAL
    supports_join = True

    @override
    def plan_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> BucketAveragingFunctions | None:
        size = averager.context.size
        return BucketAveragingFunctions(
            allreduce_nonblocking, lambda flat: round(2 * (size - 1) * _summed_bytes(flat) / size)
        )

    @override
    def plan_partial_round(
        self, averager: SharedRoundState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketAveragingFunctions | None:
        def start(flat: torch.Tensor, *, name: str) -> Handle[torch.Tensor]:
            given = flat if averager.context.rank in active_ranks else zeros_like(flat)
            return average_active_ranks_nonblocking(given, len(active_ranks), name=name)

        plan = self.plan_round(averager, schedule, averager.round)
        return None if plan is None else replace(plan, start=start)


class NoCommunication(TwoSidedCommunication):
    """Choice to send nothing: every rank trains alone."""

    name = "empty"
    how = None
    supports_join = True

    @override
    def plan_round(
        self, averager: SharedRoundState, schedule: Schedule | None, number: int
    ) -> BucketAveragingFunctions | None:
        return None

    @override
    def plan_partial_round(
        self, averager: SharedRoundState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketAveragingFunctions | None:
        return None


def _summed_bytes(flat: torch.Tensor) -> int:
    """Return the bytes of a tensor in the dtype in which it is accumulated."""
    return flat.numel() * DTYPES[flat.dtype].accumulate.itemsize
