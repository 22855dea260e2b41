"""``factored_gossip_diloco``: DiLoCo by two gossip rounds, one of them during local steps."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.outer_nesterov import MOMENTUM, OUTER, OuterStep
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.topology import random_matching

_MIXED = "outer parameters, mixed"


class FactoredGossipDiLoCo(OuterStep):
    r"""Factored Gossip DiLoCo: DiLoCo by two gossip rounds, one of them during the local steps.

    .. math:: \psi_i = \sum_j w'_{ij} \theta_j, \qquad m_i \leftarrow \mu m_i + \Delta_i, \qquad
              \theta_i \leftarrow \sum_j w_{ij} \big(\psi_j - \eta\, (\Delta_j + \mu m_j)\big)

    with :math:`\theta_i` the parameters from which rank i makes H local steps of the user's
    optimizer, and :math:`\Delta_i` the change that these make, with its sign turned. The first
    round, by W', sends :math:`\theta` while the steps are made, and the second one, by W, blocks.
    So no gradient is stale, and a rank waits for one message to its neighbours where a round
    takes less than H steps. The distance between ranks is contracted by both, the changes of the
    steps by the second alone; the mean over ranks makes DiLoCo's step, and with exact averages in
    the second round it is DiLoCo. W and W' are those of consecutive rounds of the schedule, by
    default random pairs. A rank keeps :math:`\theta_i`, :math:`\psi_i` and :math:`m_i`.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range.

    References:
        Koneputugodage et al., "Factored Gossip DiLoCo: reducing blocking communication in DiLoCo",
        ICML 2026, of which the abstract was seen, and no formula: that each rank keeps its own
        momentum, and that both rounds are of one kind, is chosen here.
    """

    name = "factored_gossip_diloco"
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = random_matching
    needs = TopologyRequirements(doubly_stochastic=True)
    hidden_rounds = True
    parameter_state = (OUTER, _MIXED)
    state_copies = 3
    messages = 2

    def __init__(
        self,
        *,
        communication_interval: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        outer, mu = bucket.state[OUTER], self.outer_momentum
        if _hidden(bucket):
            return outer
        step = (outer - bucket.flat).mul_(1 + mu).add_(bucket.state[MOMENTUM], alpha=mu * mu)
        return torch.sub(bucket.state[_MIXED], step, alpha=self.outer_lr)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer, mixed = bucket.state[OUTER], bucket.state[_MIXED].copy_(received.mixed)
        if not _hidden(bucket):
            bucket.state[MOMENTUM].mul_(self.outer_momentum).add_(outer - bucket.flat)
            bucket.flat.copy_(outer.copy_(mixed))


def _hidden(bucket: AveragedBucket) -> bool:
    return bucket.round % 2 == 1
