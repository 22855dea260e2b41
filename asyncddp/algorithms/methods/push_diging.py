"""``push_diging``: gradient tracking with push-sum, on directed graphs."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.tensors.allocation import make_tensor

_TRACKER, _GRADIENT, _WEIGHT = "tracker", "gradient", "push-sum weight"


class PushDIGing(Algorithm):
    r"""Push-DIGing: gradient tracking with push-sum, for graphs without doubly stochastic weights.

    .. math:: y_i^{k} = \sum_j a_{ij} y_j^{k-1} + g_i(x_i^{k}) - g_i(x_i^{k-1}), \qquad
              \begin{pmatrix} u_i \\ v_i \end{pmatrix}^{k+1} = \sum_j a_{ij}
              \begin{pmatrix} v_j\, \big(x_j - U(y_j / v_j)\big) \\ v_j \end{pmatrix}^{k},
              \qquad x_i^{k+1} = u_i^{k+1} / v_i^{k+1}

    with U the update of the wrapped optimizer, for SGD
    :math:`v_j (x_j - \gamma y_j / v_j) = u_j - \gamma y_j`. The columns of A sum to one, as those
    of ``topology.push_weights(graph)`` for any digraph. The model holds x. One round sends two
    tensors and one number to each neighbour.

    References:
        Nedić, Olshevsky, Shi, "Achieving geometric convergence for distributed optimization over
        time-varying graphs", SIAM J. Optim. 27(4), 2017.
    """

    name = "push_diging"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS,)
    needs = TopologyRequirements(column_stochastic=True, strongly_connected=True)
    exact = True
    averaged_state = (_TRACKER, _WEIGHT)
    state_copies = messages = 2

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        weight = make_tensor(1.0, torch.float64).to(bucket.flat.device)
        return {_TRACKER: bucket.new_state(), _GRADIENT: bucket.new_state(), _WEIGHT: weight}

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        gradient, tracker = bucket.gradient(), bucket.state[_TRACKER]
        tracker.add_(gradient).sub_(bucket.state[_GRADIENT])
        bucket.state[_GRADIENT].copy_(gradient)
        bucket.set_gradient(tracker / bucket.state[_WEIGHT])

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.flat * bucket.state[_WEIGHT]

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        super().incoming(bucket, received)
        bucket.flat.div_(bucket.state[_WEIGHT])

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.state[_TRACKER].copy_(bucket.state[_GRADIENT])
        bucket.state[_WEIGHT].fill_(1.0)
