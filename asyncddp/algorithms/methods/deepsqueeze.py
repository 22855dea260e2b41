"""``deepsqueeze``: gossip of compressed models with error feedback on each rank."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.compressed_gossip import CompressedGossip
from asyncddp.algorithms.topology_requirements import TopologyRequirements

_ERROR = "compression error"


class DeepSqueeze(CompressedGossip):
    r"""DeepSqueeze: gossip of compressed models; compression errors are added to the next model.

    .. math:: v_i = h_i + \delta_i, \qquad q_i = Q(v_i), \qquad \delta_i \leftarrow v_i - q_i,
              \qquad x_i \leftarrow h_i + \gamma_c \sum_j w_{ij} (q_j - q_i)

    with :math:`h_i` the parameters after the optimizer's step. The mean over ranks changes by the
    optimizers' steps alone. A rank keeps :math:`\delta_i`, one tensor of the model's size, unknown
    to its neighbours. As models are sent instead of differences, compression errors do not vanish:
    the distance between ranks stays about :math:`\gamma_c` times the compression error of a model,
    so that strong compression needs small steps, or ``choco_sgd``.

    Args:
        consensus_step: :math:`\gamma_c` in (0, 1]; None takes the share of the squared norm that
            the compressor keeps of normally distributed numbers.
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    Raises:
        ArgumentError: A step outside of (0, 1].

    References:
        Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu, "DeepSqueeze: decentralization meets
        error-compensated compression", 2019.
    """

    name = "deepsqueeze"
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True)
    zero_state = (_ERROR,)
    state_copies = 1

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return (bucket.state[_ERROR] + bucket.flat).to(bucket.flat.dtype)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        error, step = bucket.state[_ERROR], self.step_of(bucket)
        error.add_(bucket.flat)
        received.add_own_to(error, -1.0)
        bucket.flat.add_(received.mixed, alpha=step)
        received.add_own_to(bucket.flat, -step)
