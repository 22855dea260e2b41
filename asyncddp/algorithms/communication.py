"""Among whom a bucket is averaged: the kinds of communication that a method can be given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from asyncddp.algorithms.contract import How
from asyncddp.algorithms.joining import Act
from asyncddp.algorithms.rounds import Messages, Round, Route
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import UsageError
from asyncddp.memory.allocate import zeros_like
from asyncddp.memory.dtypes import DTYPES
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.hierarchical_neighbor_allreduce import (
    between_machines,
    hierarchical_neighbor_allreduce_nonblocking,
)
from asyncddp.ops.joining import average_among_nonblocking, narrowed, pass_by_nonblocking
from asyncddp.ops.mixing import Mixing
from asyncddp.ops.neighbor_allreduce import neighbor_allreduce_nonblocking, short_way
from asyncddp.ops.weights import Weights, WeightsOf
from asyncddp.registry import Registry
from topology import GraphOrSchedule, Schedule

if TYPE_CHECKING:
    from asyncddp.algorithms.mixer import Mixer

__all__ = ["COMMUNICATIONS", "Communication", "HandSet", "TwoSided"]


@dataclass
class HandSet:
    """Weights that the user sets by hand for the next round; None leaves them to the topology."""

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None


class Communication(ABC):
    """One kind of averaging.

    Attributes:
        name: As users give it.
        how: Which permission of a method it needs; None for any.
        joins: Whether its rounds can go on without ranks that are done.
    """

    name: ClassVar[str]
    how: ClassVar[How | None]
    joins: ClassVar[bool] = True

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

    def lay_out(self, mixer: Mixer) -> None:  # noqa: B027 - few do
        """Prepare for rounds about the wrapper's flat tensors."""

    @abstractmethod
    def begin(self, mixer: Mixer, schedule: Schedule | None) -> Round | None:
        """Open the wrapper's next round; None where nothing is to be sent.

        Args:
            mixer: Has its rounds.
            schedule: The wrapper's own topology; None for the context's.

        Raises:
            ArgumentError: Weights set by hand that cannot be.
        """

    def stand_in(  # noqa: B027 - few do
        self, mixer: Mixer, flats: Sequence[torch.Tensor], training: Sequence[int]
    ) -> None:
        """Take part in a round on a rank that is done; nothing, where nobody waits for it.

        Args:
            mixer: Has its rounds.
            flats: The tensors that would be averaged; they stay as they are.
            training: The ranks that train.

        Raises:
            PeerError: A peer failed, or does something else.
        """


class TwoSided(Communication):
    """A kind in which those who average wait for each other."""

    joins = False

    def begin(self, mixer: Mixer, schedule: Schedule | None) -> Round | None:
        """Open a round of messages, inside ``join`` among those who train."""
        route = self.route(mixer.context, schedule, mixer.hand, mixer.round)
        if route is not None and mixer.attendance is not None:
            training = mixer.attendance.train(mixer.label, Act.ROUND)
            if len(training) < mixer.context.size:
                route = self.among(mixer, schedule, training)
        return None if route is None else Messages(mixer, route)

    def stand_in(
        self, mixer: Mixer, flats: Sequence[torch.Tensor], training: Sequence[int]
    ) -> None:
        """Do this rank's part of the others' round, and count it."""
        route = self.among(mixer, None, training)
        with use(mixer.context), torch.no_grad():
            handles = [
                route.start(flat, f"{mixer.label}.bucket{index}")
                for index, flat in enumerate(flats)
            ]
        for handle in handles:
            handle.wait()
        mixer.bytes_sent += sum(map(route.cost, flats))
        mixer.round += 1

    def among(self, mixer: Mixer, schedule: Schedule | None, training: Collection[int]) -> Route:
        """Look the next round up where only some ranks train; elsewhere, their part of it.

        Args:
            mixer: Has its rounds.
            schedule: The wrapper's own topology; None for the context's.
            training: The ranks that train.

        Raises:
            UsageError: It cannot be formed so.
            ArgumentError: Weights set by hand that cannot be.
        """
        raise UsageError(
            f"join: {self.name} needs all ranks in every round; expected a communication that can "
            "go on without those that are done, such as neighbor_allreduce or allreduce"
        )

    @abstractmethod
    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """Look round ``k`` up; None where nothing is to be sent.

        Raises:
            ArgumentError: Weights set by hand that cannot be.
        """


class NeighborAllreduce(TwoSided):
    """The weighted average with the neighbours."""

    name = "neighbor_allreduce"
    how = How.NEIGHBORS
    joins = True

    def places(self, context: Context) -> int | None:
        """One for each rank."""
        return context.size

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        """The topology between ranks."""
        return context.topologies.load()

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Weights of ranks."""
        return {
            "self_weight": hand.self_weight,
            "src_weights": hand.src_weights,
            "dst_weights": hand.dst_weights,
        }

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """To this round's neighbours."""
        return self._along(context, self._row(context, schedule, hand, k))

    def among(self, mixer: Mixer, schedule: Schedule | None, training: Collection[int]) -> Route:
        """The weights of those who are done are the own tensor's."""
        context = mixer.context
        if context.rank in training:
            row = self._row(context, schedule, mixer.hand, mixer.round)
            return self._along(context, narrowed(row, training))
        return Route(lambda flat, name: pass_by_nonblocking(flat, name=name), lambda flat: 0)

    def _row(self, context: Context, schedule: Schedule | None, hand: HandSet, k: int) -> Mixing:
        schedule = schedule or context.topologies.ranks
        return WeightsOf(self.name, schedule, context.rank, self.by_hand(hand), k).at(k)

    def _along(self, context: Context, row: Mixing) -> Route:
        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging with these neighbours."""
            return neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_weights=row.src_weights,
                dst_weights=row.dst_weights,
                name=name,
            )

        def way(flat: torch.Tensor, name: str) -> Callable[[], bool] | None:
            """The short way of this bucket."""
            return short_way(context, row, flat, name)

        return Route(start, lambda flat: len(row.dst_weights) * flat.nbytes, way)


class HierarchicalNeighborAllreduce(TwoSided):
    """The mean inside each machine, the weighted average between machines."""

    name = "hierarchical_neighbor_allreduce"
    how = How.MACHINES

    def places(self, context: Context) -> int | None:
        """One for each machine."""
        return context.machine_size

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        """The topology between machines."""
        return context.topologies.load_machine()

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Weights of machines."""
        return {
            "self_weight": hand.self_weight,
            "src_machine_weights": hand.src_machine_weights,
            "dst_machine_weights": hand.dst_machine_weights,
        }

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """Inside the machine, then to this round's machines."""
        given = self.by_hand(hand)
        schedule = schedule or between_machines(
            context, by_hand=hand.dst_machine_weights is not None
        )
        row = WeightsOf(self.name, schedule, context.machine_rank, given, k).at(k)

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging with these machines."""
            return hierarchical_neighbor_allreduce_nonblocking(
                flat,
                self_weight=row.self_weight,
                src_machine_weights=row.src_weights,
                dst_machine_weights=row.dst_weights,
                name=name,
            )

        def cost(flat: torch.Tensor) -> int:
            """Bytes that this rank sends of a bucket."""
            local, size = context.local_size, _summed(flat)
            return round((3 * (local - 1) + len(row.dst_weights)) * size / local)

        return Route(start, cost)


class Allreduce(TwoSided):
    """The average over all ranks."""

    name = "allreduce"
    how = How.GLOBAL
    joins = True

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """To all ranks."""

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging over all ranks."""
            return allreduce_nonblocking(flat, name=name)

        return self._over(context.size, start)

    def among(self, mixer: Mixer, schedule: Schedule | None, training: Collection[int]) -> Route:
        """The average over those who train; others give zeros."""
        trains = mixer.context.rank in training

        def start(flat: torch.Tensor, name: str) -> Handle[torch.Tensor]:
            """Start averaging over the ranks that still train."""
            given = flat if trains else zeros_like(flat)
            return average_among_nonblocking(given, len(training), name=name)

        return self._over(mixer.context.size, start)

    def _over(self, n: int, start: Callable[[torch.Tensor, str], Handle[torch.Tensor]]) -> Route:
        return Route(start, lambda flat: round(2 * (n - 1) * _summed(flat) / n))


class Empty(TwoSided):
    """No communication: every rank trains alone."""

    name = "empty"
    how = None
    joins = True

    def route(
        self, context: Context, schedule: Schedule | None, hand: HandSet, k: int
    ) -> Route | None:
        """Nowhere."""
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
        "win_accumulate": "asyncddp.algorithms.one_sided:Accumulate",
        "win_get": "asyncddp.algorithms.one_sided:Get",
        "win_put": "asyncddp.algorithms.one_sided:Put",
    },
    group="asyncddp.communications",
)
