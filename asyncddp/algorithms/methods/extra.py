"""``extra``: decentralised gradient descent with a dual variable that removes its bias."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.topology import symmetric_exponential

_DUAL = "dual"


class Extra(Algorithm):
    r"""EXTRA: decentralised gradient descent with a dual variable that removes its bias.

    .. math:: X^{k+1} = W X^{k} + S^{k} - U(G(X^{k})), \qquad
              S^{k+1} = S^{k} - \tfrac12 (I - W) X^{k}, \qquad S^0 = 0

    with U the update of the wrapped optimizer. Eliminating S gives
    :math:`X^{k+2} = (I + W) X^{k+1} - \tfrac12 (I + W) X^{k} - U^{k+1} + U^{k}`. Communication
    overlaps the forward and backward pass; messages and S are in float32 for half-precision
    parameters. It requires a static symmetric graph, and steps below
    :math:`(1 + \lambda_{\min}(W)) / L`. Within ``join`` S is reset when another rank is done.

    References:
        Shi, Ling, Wu, Yin, "EXTRA: an exact first-order algorithm for decentralized consensus
        optimization", SIAM J. Optim. 25(2), 2015.
    """

    name = "extra"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    default_graph = symmetric_exponential
    needs = TopologyRequirements(
        doubly_stochastic=True, symmetric=True, static_only=True, min_eigenvalue=-1.0
    )
    alternative = "gradient_tracking"
    exact = True
    zero_state = (_DUAL,)
    state_copies = 1

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.flat.to(bucket.state[_DUAL].dtype)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        dual, mixed = bucket.state[_DUAL], received.mixed
        combined = mixed + dual
        dual.add_(mixed, alpha=0.5).sub_(bucket.flat, alpha=0.5)
        bucket.flat.copy_(combined)

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.state[_DUAL].zero_()
