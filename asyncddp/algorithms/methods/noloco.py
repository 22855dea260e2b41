"""``noloco``: many local steps, then an outer step averaged over random pairs of ranks."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.outer_nesterov import MOMENTUM, OUTER, OuterStep
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_share
from asyncddp.topology import random_matching


class NoLoCo(OuterStep):
    r"""NoLoCo: DiLoCo with averages over random pairs of ranks in place of a collective.

    .. math:: \delta_i \leftarrow \mu \delta_i + \eta \sum_j w_{ij} (\theta_j - \phi_j)
              + \kappa \Big(\sum_j w_{ij} \phi_j - \phi_i\Big), \qquad
              \phi_i \leftarrow \phi_i + \delta_i, \qquad \theta_i \leftarrow \phi_i

    with :math:`\theta_i` the parameters after H local steps of the user's optimizer, and
    :math:`\phi_i` the parameters before them. By default w pairs ranks up at random in each round,
    by ``topology.random_matching``, which all ranks compute without a message. The last term
    reduces the distance between ranks. A round sends two messages to one neighbour; a rank keeps
    :math:`\phi_i` and :math:`\delta_i`. With weights that differ in the two directions it diverges.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).
        consensus_rate: :math:`\kappa` in [0, 1].

    Raises:
        ArgumentError: A number out of range.

    References:
        Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: no-all-reduce low communication
        training method for large models", 2025.
    """

    name = "noloco"
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = random_matching
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True)
    averaged_state = (OUTER,)
    messages = 2

    def __init__(
        self,
        *,
        communication_interval: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        consensus_rate: float = 0.7,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)
        self.consensus_rate = checked_share("argument consensus_rate", consensus_rate, closed=True)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.flat - bucket.state[OUTER]

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer, momentum = bucket.state[OUTER], bucket.state[MOMENTUM]
        momentum.mul_(self.outer_momentum).add_(received.mixed, alpha=self.outer_lr)
        momentum.add_(received.states[OUTER] - outer, alpha=self.consensus_rate)
        outer.add_(momentum)
        bucket.flat.copy_(outer)
