"""Among whom a bucket is averaged: the kinds of communication that a method can be given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncddp.algorithms.contract import How
from asyncddp.context import Context
from asyncddp.engine import Handle
from asyncddp.memory.dtypes import DTYPES
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_neighbor_allreduce import (
    between_machines,
    hierarchical_neighbor_allreduce_nonblocking,
)
from asyncddp.ops.neighbor_allreduce import neighbor_allreduce_nonblocking, short_way
from asyncddp.ops.weights import Weights, WeightsOf
from asyncddp.registry import Registry
from topology import GraphOrSchedule, Schedule

__all__ = ["COMMUNICATIONS", "Communication", "HandSet", "Route"]


@dataclass
class HandSet:
    """Weights that the user sets by hand for the next round; None leaves them to the topology."""

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None


@dataclass(frozen=True)
class Route:
    """One round on one rank.

    Attributes:
        start: Starts averaging a flat tensor under a name.
        cost: Bytes that this rank sends for a flat tensor.
        way: The short way of averaging such a tensor in place, if there is one: where neighbours
            read each other's memory, nothing is gained by starting early.
    """

    start: Callable[[torch.Tensor, str], Handle[torch.Tensor]]
    cost: Callable[[torch.Tensor], int]
    way: Callable[[torch.Tensor, str], Callable[[], bool] | None] = lambda flat, name: None


class Communication(ABC):
    """One kind of averaging.

    Attributes:
        name: As users give it.
        how: Which permission of a method it needs; None for any.
    """

    name: ClassVar[str]
    how: ClassVar[How | None]

    def places(self, context: Context) -> int | None:
        """The number of nodes of its topology; None if it has none."""
        del context
        return None

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        """The context's topology for it."""
        del context
        return None

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """The weights set by hand that concern it: own, sources, targets."""
        del hand
        return {}

    @abstractmethod
    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """Look round ``k`` up; None where nothing is to be sent.

        Raises:
            ArgumentError: Weights set by hand that cannot be.
        """


class NeighborAllreduce(Communication):
    """The weighted average with the neighbours."""

    name = "neighbor_allreduce"
    how = How.NEIGHBORS

    def places(self, context: Context) -> int | None:
        return context.size

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        return context.topologies.load()

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        return {
            "self_weight": hand.self_weight,
            "src_weights": hand.src_weights,
            "dst_weights": hand.dst_weights,
        }

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        given = self.by_hand(hand)
        schedule = schedule or context.topologies.ranks
        row = WeightsOf(self.name, schedule, context.rank, given, k).at(k)

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            return neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_weights=row.src_weights,
                dst_weights=row.dst_weights,
                name=name,
            )

        def way(flat: torch.Tensor, name: str) -> Callable[[], bool] | None:
            return short_way(context, row, flat, name)

        return Route(start, lambda flat: len(row.dst_weights) * flat.nbytes, way)


class HierarchicalNeighborAllreduce(Communication):
    """The mean inside each machine, the weighted average between machines."""

    name = "hierarchical_neighbor_allreduce"
    how = How.MACHINES

    def places(self, context: Context) -> int | None:
        return context.machine_size

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        return context.topologies.load_machine()

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        return {
            "self_weight": hand.self_weight,
            "src_machine_weights": hand.src_machine_weights,
            "dst_machine_weights": hand.dst_machine_weights,
        }

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        given = self.by_hand(hand)
        schedule = schedule or between_machines(
            context, by_hand=hand.dst_machine_weights is not None
        )
        row = WeightsOf(self.name, schedule, context.machine_rank, given, k).at(k)

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            return hierarchical_neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_machine_weights=row.src_weights,
                dst_machine_weights=row.dst_weights,
                name=name,
            )

        def cost(flat: torch.Tensor) -> int:
            local, size = context.local_size, _summed(flat)
            return round((3 * (local - 1) + len(row.dst_weights)) * size / local)

        return Route(start, cost)


class Allreduce(Communication):
    """The average over all ranks."""

    name = "allreduce"
    how = How.GLOBAL

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            return allreduce_nonblocking(flat, name=name)

        n = context.size
        return Route(start, lambda flat: round(2 * (n - 1) * _summed(flat) / n))


class Empty(Communication):
    """No communication: every rank trains alone."""

    name = "empty"
    how = None

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        return None


def _summed(flat: torch.Tensor) -> int:
    """Bytes of a tensor in the dtype in which it is summed on the way."""
    return flat.numel() * DTYPES[flat.dtype].accumulate.itemsize


COMMUNICATIONS: Registry[type[Communication]] = Registry(
    "communication",
    {
        "allreduce": f"{__name__}:Allreduce",
        "empty": f"{__name__}:Empty",
        "hierarchical_neighbor_allreduce": f"{__name__}:HierarchicalNeighborAllreduce",
        "neighbor_allreduce": f"{__name__}:NeighborAllreduce",
    },
    group="asyncddp.communications",
)
