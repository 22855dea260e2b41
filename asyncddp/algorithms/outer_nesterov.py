"""Base classes of algorithms with local steps and an outer Nesterov optimizer, such as DiLoCo."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share

OUTER, MOMENTUM = "outer parameters", "outer momentum"


class OuterStep(Algorithm):
    r"""Base class of algorithms that make an outer step along the model change of local steps.

    A rank keeps :math:`\theta`, the outer parameters after the last such step, and a momentum.

    Args:
        communication_interval: H, steps of the optimizer from one round to the next.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range.
    """

    when = CommunicationTiming.AFTER_STEP
    averages_first_step = False
    changes_alone = True
    rounds_momentum = "outer_momentum"
    parameter_state: ClassVar[tuple[str, ...]] = (OUTER,)
    zero_state: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    state_copies = 2

    def __init__(self, communication_interval: int, outer_lr: float, outer_momentum: float) -> None:
        self.communication_interval = checked_interval(communication_interval)
        self.outer_lr = checked_positive("argument outer_lr", outer_lr)
        self.outer_momentum = checked_share("argument outer_momentum", outer_momentum)


class OuterNesterov(OuterStep):
    r"""Base class of algorithms that feed the mean model change to an outer Nesterov optimizer.

    .. math:: \Delta = \theta - \frac1n \sum_j \theta_j, \qquad m \leftarrow \mu m + \Delta, \qquad
              \theta \leftarrow \theta - \eta\, (\Delta + \mu m)

    with :math:`\theta` the outer parameters, which are the same on all ranks.
    """

    how = (CommunicationPattern.GLOBAL,)
    compression = CompressionUse.AVERAGES
    joined_ranks = JoinedRanks.FOLLOW

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.state[OUTER] - bucket.flat

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        bucket.flat.copy_(self.step_outer(bucket, received.mixed))

    def step_outer(self, bucket: AveragedBucket, change: torch.Tensor) -> torch.Tensor:
        r"""Make the outer step along :math:`\Delta`; return the outer parameters."""
        outer, momentum = bucket.state[OUTER], bucket.state[MOMENTUM]
        mu = self.outer_momentum
        momentum.mul_(mu).add_(change)
        outer.sub_(change, alpha=self.outer_lr).sub_(momentum, alpha=self.outer_lr * mu)
        return outer
