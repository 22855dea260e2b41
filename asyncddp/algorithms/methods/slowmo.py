"""``slowmo``: slow momentum of how far steps of another method have led."""

from typing import Literal

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    JoinedRanks,
)
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share
from asyncddp.errors import ArgumentError

_OUTER, _MOMENTUM = "outer parameters", "slow momentum"


class SlowMo(Algorithm):
    r"""SlowMo: steps of another method, and every H of them one with momentum along their change.

    .. math:: u \leftarrow \beta u + \frac{1}{\gamma} \Big(y - \frac1n \sum_j x_j\Big), \qquad
              y \leftarrow y - \alpha \gamma u, \qquad x_i \leftarrow y

    with y the parameters that all ranks held after the last such step, and :math:`\gamma` the
    learning rate of now, so that momentum outlives its decay. Steps in between are local ones of
    the user's optimizer, momentum and all, or those of ``adapt_then_combine``, with neighbours in
    any doubly stochastic graph or schedule. With :math:`\beta = 0, \alpha = 1` it is ``local_sgd``,
    or gossip with a global average every H steps. It keeps y and u, two tensors of the model's
    size; all ranks must begin from one model.

    Args:
        communication_interval: H; 12 to 48 in the paper.
        beta: :math:`\beta` in [0, 1); 0.2 to 0.7 in the paper.
        alpha: :math:`\alpha` above 0.
        base: ``"local_sgd"``, or ``"adapt_then_combine"``.

    Raises:
        ArgumentError: A number out of range, or another base.

    References:
        Wang, Tantia, Ballas, Rabbat, "SlowMo: improving communication-efficient distributed SGD
        with slow momentum", ICLR 2020.
    """

    name = "slowmo"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False
    joined_ranks = JoinedRanks.FOLLOW
    changes_alone = True
    parameter_state = (_OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(
        self,
        *,
        communication_interval: int = 12,
        beta: float = 0.5,
        alpha: float = 1.0,
        base: Literal["local_sgd", "adapt_then_combine"] = "local_sgd",
    ) -> None:
        interval = self.communication_interval = checked_interval(communication_interval)
        self._rounds = 1  # from one slow step to the next
        if base not in ("local_sgd", "adapt_then_combine"):
            raise ArgumentError(
                f"argument base: expected 'local_sgd' or 'adapt_then_combine', got {base!r}"
            )
        if base == "adapt_then_combine":
            self.communication_interval, self._rounds = 1, interval
            self.how = (CommunicationPattern.NEIGHBORS,)
            self.needs = TopologyRequirements(doubly_stochastic=True)
        self.beta = checked_share("argument beta", beta)
        self.alpha = checked_positive("argument alpha", alpha)

    @override
    def averages_all(self, number: int) -> bool:
        return (number + 1) % self._rounds == 0

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        if not self.averages_all(bucket.round):
            bucket.flat.copy_(received.mixed)
            return
        outer, momentum = bucket.state[_OUTER], bucket.state[_MOMENTUM]
        momentum.mul_(self.beta).add_(bucket.per_step_size(outer - received.mixed))
        outer.sub_(momentum * bucket.step_sizes(), alpha=self.alpha)
        bucket.flat.copy_(outer)
