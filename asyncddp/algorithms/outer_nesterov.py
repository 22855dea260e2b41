"""Base classes of algorithms with local steps and an outer Nesterov optimizer, such as DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
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
from asyncddp.algorithms.wrapper_setup import (
    checked_integer,
    checked_interval,
    checked_positive,
    checked_share,
)
from asyncddp.errors import ArgumentError

OUTER, MOMENTUM = "outer parameters", "outer momentum"
_FRAGMENTS = 4


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


class FragmentNesterov(OuterNesterov):
    """Base class of algorithms that make such a step for one fragment of the model at a time.

    Args:
        communication_interval: h, steps of the optimizer from one round to the next.
        fragments: P, at most the number of parameters; None for 4, of which some may be empty.
        outer_lr: The outer step size, above 0.
        outer_momentum: The outer momentum, in [0, 1).

    Raises:
        ArgumentError: A number out of range.
    """

    def __init__(
        self,
        communication_interval: int,
        fragments: int | None,
        outer_lr: float,
        outer_momentum: float,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)
        self._wanted = fragments
        self.fragments = checked_integer(
            "argument fragments", _FRAGMENTS if fragments is None else fragments, 1
        )

    @override
    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().check_optimizer(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._wanted is not None and self._wanted > count:
            raise ArgumentError(
                f"argument fragments: expected at most {count}, as many as there are parameters, "
                f"got {self._wanted}: rounds of the others would send nothing"
            )

    @override
    def messages_of(self, shape: Sequence[int]) -> float:
        return 1.0 / self.fragments

    @override
    def takes_part(self, bucket: AveragedBucket) -> bool:
        return bucket.round % self.fragments == bucket.fragment
