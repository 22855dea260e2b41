"""Base class of methods with local steps and an outer Nesterov optimizer, such as DiLoCo."""

from __future__ import annotations

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share

OUTER, _MOMENTUM = "outer parameters", "outer momentum"


class OuterNesterov(Algorithm):
    r"""Base class of methods that feed the mean change of local steps to an outer optimizer.

    .. math:: \Delta = \theta - \frac1n \sum_j \theta_j, \qquad m \leftarrow \mu m + \Delta, \qquad
              \theta \leftarrow \theta - \eta\, (\Delta + \mu m)

    with :math:`\theta` the outer parameters, which are the same on all ranks.

    Args:
        communication_interval: H, steps of the optimizer from one round to the next.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range.
    """

    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    compression = CompressionUse.AVERAGES
    averages_first_step = False
    joined_ranks = JoinedRanks.FOLLOW
    changes_alone = True
    rounds_momentum = "outer_momentum"
    parameter_state = (OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(self, communication_interval: int, outer_lr: float, outer_momentum: float) -> None:
        self.communication_interval = checked_interval(communication_interval)
        self.outer_lr = checked_positive("argument outer_lr", outer_lr)
        self.outer_momentum = checked_share("argument outer_momentum", outer_momentum)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.state[OUTER] - bucket.flat

    def step_outer(self, bucket: AveragedBucket, change: torch.Tensor) -> torch.Tensor:
        r"""Make the outer step along :math:`\Delta`; return the outer parameters."""
        outer, momentum = bucket.state[OUTER], bucket.state[_MOMENTUM]
        mu = self.outer_momentum
        momentum.mul_(mu).add_(change)
        outer.sub_(change, alpha=self.outer_lr).sub_(momentum, alpha=self.outer_lr * mu)
        return outer
