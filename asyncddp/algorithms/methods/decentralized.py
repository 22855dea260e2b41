"""``decentralized``: averages parameters over all ranks or in pairs as gradients are computed."""

from typing import Literal

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_interval
from asyncddp.errors import ArgumentError
from asyncddp.topology import GraphOrSchedule, complete, shift_one


class Decentralized(Algorithm):
    r"""Decentralised SGD with Bagua's choices of peers: all ranks, or one peer that changes.

    .. math:: x_i^{+} = \bar x_i - U(g_i(x_i)), \qquad
              \bar x_i = \frac{1}{n} \sum_j x_j \quad\text{or}\quad \frac{x_i + x_p}{2}

    The gradient is computed at the parameters before averaging, and applied to the averaged ones;
    communication overlaps the forward and backward pass. It is ``adapt_with_combine`` with these
    peers and an interval that begins with the first step.

    Args:
        peer_selection_mode: ``"all"`` averages all ranks; ``"shift_one"`` pairs each rank of the
            lower half with one of the upper half, another in each round, by ``topology.shift_one``.
        communication_interval: Steps of the optimizer, not backward passes, between averagings.
        hierarchical: Whether the peers are machines, whose ranks average first and hold one model
            after each averaging.

    Raises:
        ArgumentError: Another mode.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS
        2017. Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB
        2021.
    """

    name = "decentralized"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (
        CommunicationPattern.GLOBAL,
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
    )
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)

    def __init__(
        self,
        *,
        peer_selection_mode: Literal["all", "shift_one"] = "all",
        communication_interval: int = 1,
        hierarchical: bool = False,
    ) -> None:
        if peer_selection_mode not in ("all", "shift_one"):
            raise ArgumentError(
                "argument peer_selection_mode: expected 'all' or 'shift_one', got "
                f"{peer_selection_mode!r}"
            )
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = checked_interval(communication_interval)
        flat = "allreduce" if peer_selection_mode == "all" else "neighbor_allreduce"
        self.default_communication = "hierarchical_neighbor_allreduce" if hierarchical else flat

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return complete(nodes) if self.peer_selection_mode == "all" else shift_one(nodes)
