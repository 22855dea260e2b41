"""``diloco``: many local steps, then a step of an outer Nesterov optimizer."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm, CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share

_OUTER, _MOMENTUM = "outer parameters", "outer momentum"


class DiLoCo(Algorithm):
    r"""DiLoCo: H local steps, whose mean change is the gradient of an outer Nesterov step.

    .. math:: \Delta = \theta - \frac1n \sum_j \theta_j, \qquad m \leftarrow \mu m + \Delta, \qquad
              \theta \leftarrow \theta - \eta\, (\Delta + \mu m), \qquad \theta_i \leftarrow \theta

    with :math:`\theta` the parameters that all ranks held after the last outer step. The optimizer
    of the local steps is the user's, AdamW in the paper; its state stays with each rank. It keeps
    :math:`\theta` and m, two tensors of the model's size; all ranks must begin from one model.

    Args:
        communication_interval: H.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range.

    References:
        Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
    """

    name = "diloco"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False
    changes_alone = True
    parameter_state = (_OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(
        self,
        *,
        communication_interval: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        self.communication_interval = checked_interval(communication_interval)
        self.outer_lr = checked_positive("argument outer_lr", outer_lr)
        self.outer_momentum = checked_share("argument outer_momentum", outer_momentum)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.state[_OUTER] - bucket.flat

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer, momentum = bucket.state[_OUTER], bucket.state[_MOMENTUM]
        change, mu = received.mixed, self.outer_momentum
        momentum.mul_(mu).add_(change)
        outer.sub_(change, alpha=self.outer_lr).sub_(momentum, alpha=self.outer_lr * mu)
        bucket.flat.copy_(outer)
