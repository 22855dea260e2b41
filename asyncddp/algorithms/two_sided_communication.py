"""Ways to average by messages: with neighbours, between machines, over all ranks, or not at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from asyncddp.algorithms.algorithm import CommunicationPattern
from asyncddp.algorithms.averager_state import AveragerState, WeightOverrides
from asyncddp.algorithms.averaging_round import AveragingRound, BucketOperations, TwoSidedRound
from asyncddp.algorithms.communication import Communication
from asyncddp.algorithms.join_coordinator import CollectiveKind
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
from asyncddp.ops.weight_resolver import WeightResolver, Weights
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.dtypes import DTYPES
from topology import GraphOrSchedule, Schedule


class TwoSidedCommunication(Communication):
    """Averaging by messages (base class): the ranks that average wait for each other."""

    supports_join = False

    def begin_round(
        self, averager: AveragerState, schedule: Schedule | None
    ) -> AveragingRound | None:
        """Begin a round of messages; inside ``join`` only among the active ranks."""
        plan = self.plan_round(averager.context, schedule, averager.overrides, averager.round)
        if plan is not None and averager.join_coordinator is not None:
            active_ranks = averager.join_coordinator.notify(
                averager.label, CollectiveKind.AVERAGING_ROUND
            )
            if len(active_ranks) < averager.context.size:
                plan = self.plan_partial_round(averager, schedule, active_ranks)
        return None if plan is None else TwoSidedRound(averager, plan)

    def shadow_round(
        self, averager: AveragerState, flats: Sequence[torch.Tensor], active_ranks: Sequence[int]
    ) -> None:
        """Exchange this joined rank's messages of the active ranks' round, and count the round."""
        plan = self.plan_partial_round(averager, None, active_ranks)
        with use(averager.context), torch.no_grad():
            handles = [
                plan.start(flat, f"{averager.label}.bucket{index}")
                for index, flat in enumerate(flats)
            ]
        for handle in handles:
            handle.wait()
        averager.bytes_sent += sum(map(plan.send_bytes, flats))
        averager.round += 1

    def plan_partial_round(
        self, averager: AveragerState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketOperations:
        """Plan this rank's part of the next round where only some ranks are active.

        Args:
            averager: State of this rank's averager.
            schedule: The averager's own topology; None for the context's.
            active_ranks: The ranks that still train.

        Raises:
            UsageError: This communication needs all ranks.
            ArgumentError: Invalid weight overrides.
        """
        raise UsageError(
            f"join: {self.name} needs all ranks in every round; expected a communication that can "
            "go on without those that are done, such as neighbor_allreduce or allreduce"
        )

    @abstractmethod
    def plan_round(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> BucketOperations | None:
        """Plan this rank's part of round ``k``; returns None where nothing is to be sent.

        Raises:
            ArgumentError: Invalid weight overrides.
        """


class NeighborAllreduceCommunication(TwoSidedCommunication):
    """Weighted average with the neighbours in the graph of ranks, by messages."""

    name = "neighbor_allreduce"
    how = CommunicationPattern.NEIGHBORS
    supports_join = True

    def node_count(self, context: Context) -> int | None:
        """Return the number of ranks."""
        return context.size

    def context_topology(self, context: Context) -> GraphOrSchedule | None:
        """Return the context's topology between ranks."""
        return context.topologies.load()

    def relevant_overrides(
        self, overrides: WeightOverrides
    ) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Select the overrides of weights of ranks."""
        return {
            "self_weight": overrides.self_weight,
            "src_weights": overrides.src_weights,
            "dst_weights": overrides.dst_weights,
        }

    def plan_round(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> BucketOperations | None:
        """Plan messages to this round's neighbours."""
        return self._plan_for(context, self._weight_row(context, schedule, overrides, k))

    def plan_partial_round(
        self, averager: AveragerState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketOperations:
        """Plan with the weights of joined neighbours moved to this rank's own tensor."""
        context = averager.context
        if context.rank in active_ranks:
            row = self._weight_row(context, schedule, averager.overrides, averager.round)
            return self._plan_for(context, renormalise(row, active_ranks))
        return BucketOperations(
            lambda flat, name: skip_round_nonblocking(flat, name=name), lambda flat: 0
        )

    def _weight_row(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> WeightRow:
        schedule = schedule or context.topologies.ranks
        return WeightResolver(
            self.name, schedule, context.rank, self.relevant_overrides(overrides), k
        ).row_at(k)

    def _plan_for(self, context: Context, row: WeightRow) -> BucketOperations:
        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging a tensor with the neighbours."""
            return neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_weights=row.src_weights,
                dst_weights=row.dst_weights,
                name=name,
            )

        def fast_path(flat: torch.Tensor, name: str) -> Callable[[], bool] | None:
            """Return the fast path for this bucket, if there is one."""
            return find_fast_path(context, row, flat, name)

        return BucketOperations(start, lambda flat: len(row.dst_weights) * flat.nbytes, fast_path)


class HierarchicalNeighborAllreduceCommunication(TwoSidedCommunication):
    """Hierarchical average by messages: mean per machine, weighted average between machines."""

    name = "hierarchical_neighbor_allreduce"
    how = CommunicationPattern.MACHINES

    def node_count(self, context: Context) -> int | None:
        """Return the number of machines."""
        return context.machine_size

    def context_topology(self, context: Context) -> GraphOrSchedule | None:
        """Return the context's topology between machines."""
        return context.topologies.load_machine()

    def relevant_overrides(
        self, overrides: WeightOverrides
    ) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Select the overrides of weights of machines."""
        return {
            "self_weight": overrides.self_weight,
            "src_machine_weights": overrides.src_machine_weights,
            "dst_machine_weights": overrides.dst_machine_weights,
        }

    def plan_round(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> BucketOperations | None:
        """Plan the mean within the machine and messages to this round's neighbour machines."""
        given = self.relevant_overrides(overrides)
        schedule = schedule or machine_schedule(
            context, by_hand=overrides.dst_machine_weights is not None
        )
        row = WeightResolver(self.name, schedule, context.machine_rank, given, k).row_at(k)

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging a tensor with the neighbour machines."""
            return hierarchical_neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_machine_weights=row.src_weights,
                dst_machine_weights=row.dst_weights,
                name=name,
            )

        def send_bytes(flat: torch.Tensor) -> int:
            """Return the bytes that this rank sends for a bucket."""
            local, size = context.local_size, _accumulated_bytes(flat)
            return round((3 * (local - 1) + len(row.dst_weights)) * size / local)

        return BucketOperations(start, send_bytes)


class AllreduceCommunication(TwoSidedCommunication):
    """Global average over all ranks (allreduce)."""

    name = "allreduce"
    how = CommunicationPattern.GLOBAL
    supports_join = True

    def plan_round(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> BucketOperations | None:
        """Plan an allreduce over all ranks."""

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging a tensor over all ranks."""
            return allreduce_nonblocking(flat, name=name)

        return self._plan_over(context.size, start)

    def plan_partial_round(
        self, averager: AveragerState, schedule: Schedule | None, active_ranks: Collection[int]
    ) -> BucketOperations:
        """Plan an average over the active ranks, to which joined ranks contribute zeros."""
        active = averager.context.rank in active_ranks

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging a tensor over the active ranks."""
            given = flat if active else zeros_like(flat)
            return average_active_ranks_nonblocking(given, len(active_ranks), name=name)

        return self._plan_over(averager.context.size, start)

    def _plan_over(
        self, n: int, start: Callable[[torch.Tensor, str], Handle[torch.Tensor]]
    ) -> BucketOperations:
        return BucketOperations(
            start, lambda flat: round(2 * (n - 1) * _accumulated_bytes(flat) / n)
        )


class NoCommunication(TwoSidedCommunication):
    """Choice to send nothing: every rank trains alone."""

    name = "empty"
    how = None
    supports_join = True

    def plan_round(
        self, context: Context, schedule: Schedule | None, overrides: WeightOverrides, k: int
    ) -> BucketOperations | None:
        """Return None, since nothing is sent."""
        return None


def _accumulated_bytes(flat: torch.Tensor) -> int:
    """Return the bytes of a tensor in the dtype in which it is accumulated."""
    return flat.numel() * DTYPES[flat.dtype].accumulate.itemsize
