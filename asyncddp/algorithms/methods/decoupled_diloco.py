"""``decoupled_diloco``: DiLoCo for one fragment at a time, in which no rank waits for another."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received, ReceivedAverage
from asyncddp.algorithms.method_traits import CommunicationPattern, CompressionUse, JoinedRanks
from asyncddp.algorithms.outer_nesterov import OUTER, FragmentNesterov
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class DecoupledDiLoCo(FragmentNesterov):
    r"""Decoupled DiLoCo: outer steps at each rank's own pace, from what neighbours have put so far.

    .. math:: \Delta_{i,p} = \theta_{i,p} - \frac{w_{ii} x_{i,p} + \sum_j w_{ij} c_j\, b_{j,p}}
              {w_{ii} + \sum_j w_{ij} c_j}, \qquad m_i \leftarrow \mu m_i + \Delta_i, \qquad
              x_i \leftarrow \theta_i \leftarrow \theta_i - \eta\, (\Delta_i + \mu m_i)

    for fragment p of P after steps :math:`(p + 1) h, (p + 1 + P) h, \dots` of the rank itself, with
    :math:`x_i` its parameters, :math:`b_j` those that neighbour j has put last, and :math:`c_j` how
    often it has put this fragment since the last round. So a neighbour that was silent has no
    weight, and one that has made twice as many steps, on twice as much data, has twice the weight.
    Ranks in step make the rounds of DiLoCo with the neighbours' average, on the complete graph
    those of ``streaming_diloco`` without delay. Each rank keeps :math:`\theta` and m. A momentum of
    late changes may be too large: take less :math:`\mu` if ranks differ much in speed.

    Args:
        communication_interval: h, in steps of the optimizer, not backward passes.
        fragments: P, at most the number of parameters; None for 4, of which some may be empty.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range, or more fragments than parameters.

    References:
        Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026, of which
        the formulas of the outer step were seen in a summary, not the whole text. It has one
        synchronizer, which waits for a least number of learners; here each rank is its own, for its
        neighbours, and waits for none.
    """

    name = "decoupled_diloco"
    how = (CommunicationPattern.PUT,)
    needs = TopologyRequirements(doubly_stochastic=True)
    compression = CompressionUse.PERTURBS
    joined_ranks = JoinedRanks.LEAVE
    counts_puts = True

    def __init__(
        self,
        *,
        communication_interval: int = 25,
        fragments: int | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(communication_interval, fragments, outer_lr, outer_momentum)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return Algorithm.outgoing(self, bucket)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        super().incoming(bucket, ReceivedAverage(bucket.state[OUTER] - received.mixed))
