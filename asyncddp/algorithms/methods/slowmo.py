"""``slowmo``: slow momentum of the model changes that another algorithm makes in H steps."""

from collections.abc import Mapping
from typing import Literal

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    JoinedRanks,
)
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import make_tensor

_OUTER, _MOMENTUM = "outer parameters", "slow momentum"
_BEFORE, _WEIGHT = "parameters before", "push-sum weight"


class SlowMo(Algorithm):
    r"""SlowMo: steps of another algorithm, and after every H of them a step along slow momentum.

    .. math:: u \leftarrow \beta u + \frac{1}{\gamma} \Big(y - \frac1n \sum_j x_j\Big), \qquad
              y \leftarrow y - \alpha \gamma u, \qquad x_i \leftarrow y

    with y the parameters that all ranks held after the last such step, and :math:`\gamma` the
    current learning rate, so that momentum does not depend on its decay. Steps in between are local
    steps of the user's optimizer with its momentum, or steps of ``adapt_then_combine`` on any
    doubly stochastic graph or schedule, or steps of stochastic gradient push, by messages,

    .. math:: \begin{pmatrix} x_i \\ p_i \end{pmatrix} \leftarrow \sum_j a_{ij}
              \begin{pmatrix} p_j z_j - U(g_j(z_j)) \\ p_j \end{pmatrix}, \qquad
              z_i = x_i / p_i

    on directed graphs whose columns sum to one, as ``topology.push_weights(graph)`` has them; the
    model holds z, and :math:`p_i` is one after each slow step. With :math:`\beta = 0, \alpha = 1`
    it is ``local_sgd``, or gossip with a global average every H steps. It keeps y and u, two
    tensors of the model's size, and with push-sum z; all ranks begin from one model.

    Args:
        communication_interval: H, in steps of the optimizer; 12 to 48 in the paper.
        beta: :math:`\beta` in [0, 1); 0.2 to 0.7 in the paper.
        alpha: :math:`\alpha` above 0.
        base: ``"local_sgd"``, ``"adapt_then_combine"``, or ``"push_sum"``.

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
    rounds_momentum = "beta"
    parameter_state = (_OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(
        self,
        *,
        communication_interval: int = 12,
        beta: float = 0.5,
        alpha: float = 1.0,
        base: Literal["local_sgd", "adapt_then_combine", "push_sum"] = "local_sgd",
    ) -> None:
        interval = self.communication_interval = checked_interval(communication_interval)
        self._rounds = 1  # from one slow step to the next
        if base not in ("local_sgd", "adapt_then_combine", "push_sum"):
            raise ArgumentError(
                "argument base: expected 'local_sgd', 'adapt_then_combine' or 'push_sum', got "
                f"{base!r}"
            )
        if base != "local_sgd":
            self.communication_interval, self._rounds = 1, interval
            self.how = (CommunicationPattern.NEIGHBORS,)
            self.needs = TopologyRequirements(doubly_stochastic=True)
        self._pushes = base == "push_sum"
        if self._pushes:
            self.needs = TopologyRequirements(column_stochastic=True, strongly_connected=True)
            self.state_copies = 3
        self.beta = checked_share("argument beta", beta)
        self.alpha = checked_positive("argument alpha", alpha)

    @override
    def averages_all(self, number: int) -> bool:
        return (number + 1) % self._rounds == 0

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        state = super().initial_state(bucket, neighbors)
        if not self._pushes:
            return state
        weight = make_tensor(1.0, torch.float64).to(bucket.flat.device)
        return {**state, _BEFORE: bucket.new_state().copy_(bucket.flat), _WEIGHT: weight}

    @override
    def travelling_state(self, bucket: AveragedBucket) -> Mapping[str, torch.Tensor]:
        return {_WEIGHT: bucket.state[_WEIGHT]} if self._pushes else {}

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        if not self._pushes:
            return bucket.flat
        return bucket.state[_BEFORE] * (bucket.state[_WEIGHT] - 1.0) + bucket.flat

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        if self.averages_all(bucket.round):
            self._step_slowly(bucket, received.mixed)
        elif self._pushes:
            weight = bucket.state[_WEIGHT].copy_(received.states[_WEIGHT])
            bucket.flat.copy_(received.mixed / weight)
        else:
            bucket.flat.copy_(received.mixed)
        if self._pushes:
            bucket.state[_BEFORE].copy_(bucket.flat)

    def _step_slowly(self, bucket: AveragedBucket, mean: torch.Tensor) -> None:
        """Make the slow-momentum step from the mean of all ranks."""
        outer, momentum = bucket.state[_OUTER], bucket.state[_MOMENTUM]
        momentum.mul_(self.beta).add_(bucket.per_step_size(outer - mean))
        outer.sub_(momentum * bucket.step_sizes(), alpha=self.alpha)
        bucket.flat.copy_(outer)
        if self._pushes:
            bucket.state[_WEIGHT].fill_(1.0)

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        if self._pushes:
            bucket.state[_WEIGHT].fill_(1.0)
