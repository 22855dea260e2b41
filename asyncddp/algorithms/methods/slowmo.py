"""``slowmo``: slow momentum of how far local steps have led."""

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm, CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share

_OUTER, _MOMENTUM = "outer parameters", "slow momentum"


class SlowMo(Algorithm):
    r"""SlowMo: local steps, and every H of them a step with momentum along what they have changed.

    .. math:: u \leftarrow \beta u + \frac{1}{\gamma} \Big(y - \frac1n \sum_j x_j\Big), \qquad
              y \leftarrow y - \alpha \gamma u, \qquad x_i \leftarrow y

    with y the parameters that all ranks held after the last such step, and :math:`\gamma` the
    learning rate of now, so that momentum outlives its decay. The optimizer of the local steps is
    the user's, momentum and all. With :math:`\beta = 0, \alpha = 1` it is ``local_sgd``. It keeps
    y and u, two tensors of the model's size; all ranks must begin from one model.

    Args:
        communication_interval: H; 12 to 48 in the paper.
        beta: :math:`\beta` in [0, 1); 0.2 to 0.7 in the paper.
        alpha: :math:`\alpha` above 0.

    Raises:
        ArgumentError: A number out of range.

    References:
        Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient distributed SGD
        with slow momentum", ICLR 2020.
    """

    name = "slowmo"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False
    changes_alone = True
    parameter_state = (_OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(
        self, *, communication_interval: int = 12, beta: float = 0.5, alpha: float = 1.0
    ) -> None:
        self.communication_interval = checked_interval(communication_interval)
        self.beta = checked_share("argument beta", beta)
        self.alpha = checked_positive("argument alpha", alpha)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer, momentum = bucket.state[_OUTER], bucket.state[_MOMENTUM]
        momentum.mul_(self.beta).add_(bucket.per_step_size(outer - received.mixed))
        outer.sub_(momentum * bucket.step_sizes(), alpha=self.alpha)
        bucket.flat.copy_(outer)
