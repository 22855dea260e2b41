"""Ways to average with other ranks, such as allreduce: base class, and look-up by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

from asyncddp.algorithms.averaging_round import AveragingRound, CrossRoundState, WeightOverrides
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.weight_resolver import Weights
from asyncddp.registry import PluginRegistry


class Communication(ABC):
    """Way in which ranks average with each other, such as neighbor_allreduce (base class).

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

    def relevant_overrides(
        self, overrides: WeightOverrides
    ) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Select the weight overrides that it uses, by argument name."""
        return {name: getattr(overrides, name) for name in self.override_names}

    def prepare(self, averager: CrossRoundState) -> None:  # noqa: B027 - optional hook
        """Make what rounds need for the averager's buckets; collective."""

    @abstractmethod
    def begin_round(self, averager: CrossRoundState, number: int) -> AveragingRound | None:
        """Begin round ``number`` of an averager; returns None where nothing is to be sent."""

    def row_of_round(self, averager: CrossRoundState, number: int) -> WeightRow | None:
        """Return this rank's weights of a round; None if it exchanges with no neighbours."""
        return None

    def shadow_round(  # noqa: B027 - optional hook
        self, averager: CrossRoundState, active_ranks: Sequence[int]
    ) -> None:
        """Take part in a round of the active ranks on a joined rank, whose buckets stay unchanged.

        A no-op where no rank waits for a joined one.
        """


_PAIR = "asyncddp.algorithms.pair_communication"
_TWO_SIDED = "asyncddp.algorithms.two_sided_communication"
_WINDOW = "asyncddp.algorithms.window_communication"

COMMUNICATIONS: PluginRegistry[type[Communication]] = PluginRegistry(
    "communication",
    {
        "allreduce": f"{_TWO_SIDED}:AllreduceCommunication",
        "empty": f"{_TWO_SIDED}:NoCommunication",
        "hierarchical_allreduce": f"{_TWO_SIDED}:HierarchicalAllreduceCommunication",
        "hierarchical_neighbor_allreduce": (
            f"{_TWO_SIDED}:HierarchicalNeighborAllreduceCommunication"
        ),
        "neighbor_allreduce": f"{_TWO_SIDED}:NeighborAllreduceCommunication",
        "pair_average": f"{_PAIR}:PairAverageCommunication",
        "win_accumulate": f"{_WINDOW}:PushSumWindowCommunication",
        "win_get": f"{_WINDOW}:WindowGetCommunication",
        "win_put": f"{_WINDOW}:WindowPutCommunication",
    },
    group="asyncddp.communications",
)
