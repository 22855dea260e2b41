"""``demo``: DeMo (decoupled momentum): ranks sum only the momenta's largest DCT coefficients."""

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
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_share
from asyncddp.topology import complete

_OUTER, _MOMENTUM = "common parameters", "momentum"


class DeMo(Algorithm):
    r"""DeMo: momenta stay local, except for their largest DCT coefficients, which ranks sum up.

    .. math:: \delta_i \leftarrow \beta \delta_i + U(g_i), \qquad q_i = Q(\delta_i), \qquad
              \delta_i \leftarrow \delta_i - q_i, \qquad
              x \leftarrow x - \gamma\, \mathrm{sign}\Big(\sum_j q_j\Big)

    with U the update of the wrapped optimizer, SGD without momentum in the paper, and
    :math:`\gamma` its learning rate in this step. Q is ``dct_top_k`` unless you name another
    compressor. All ranks hold one model after each step, and begin from one; they end within some
    :math:`\gamma` of the optimum, so let it decrease. Each rank sends its :math:`q_i` to all other
    ranks. A rank keeps :math:`\delta_i` and the common x, two tensors of the model's size; a single
    rank trains as with its optimizer.

    Args:
        beta: :math:`\beta` in [0, 1).

    Raises:
        ArgumentError: A :math:`\beta` out of range.

    References:
        Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024.
    """

    name = "demo"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = complete
    needs = TopologyRequirements(uniform=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    default_compression = "dct_top_k"
    joined_ranks = JoinedRanks.FOLLOW
    parameter_state = (_OUTER,)
    zero_state = (_MOMENTUM,)
    state_copies = 2

    def __init__(self, *, beta: float = 0.999) -> None:
        self.beta = checked_share("argument beta", beta)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        momentum = bucket.state[_MOMENTUM].mul_(self.beta)
        momentum.add_(bucket.state[_OUTER]).sub_(bucket.flat)
        return momentum.to(bucket.flat.dtype, copy=True)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        received.add_own_to(bucket.state[_MOMENTUM], -1.0)
        outer = bucket.state[_OUTER]
        outer.sub_(received.mixed.sign().to(outer.dtype) * bucket.step_sizes())
        bucket.flat.copy_(outer)
