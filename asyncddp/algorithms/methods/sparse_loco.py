"""``sparse_loco``: many local steps, then an outer step along sparsified model changes."""

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
from asyncddp.algorithms.tile_order import from_tiles, to_tiles
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_interval, checked_positive, checked_share
from asyncddp.tensors.allocation import zeros_like
from asyncddp.topology import complete

_OUTER, _ERROR = "outer parameters", "compression error"


class SparseLoCo(Algorithm):
    r"""SparseLoCo: H local steps, then an outer step along the mean of compressed model changes.

    .. math:: e_i \leftarrow \beta e_i + \theta - \theta_i, \qquad s_i = Q(e_i), \qquad
              e_i \leftarrow e_i - s_i, \qquad \theta \leftarrow \theta - \eta \frac1n \sum_j s_j,
              \qquad \theta_i \leftarrow \theta

    with :math:`\theta` the parameters that all ranks held after the last outer step. The
    compression error of Q is kept, and serves as momentum. Q is ``top_k_int2`` unless you name
    another compressor: 64 of 4096 elements, each in 14 bits. A matrix whose sides are multiples of
    64 is compressed in tiles of 64 × 64, all other tensors in a row. Each rank sends its
    :math:`s_i` to all other ranks, as sparse sums would not stay sparse: n - 1 small messages. A
    rank keeps :math:`\theta` and :math:`e_i`, two tensors of the model's size; all ranks begin from
    one model. The optimizer of the local steps is the user's, and its state stays local; a single
    rank trains as with this optimizer.

    Args:
        communication_interval: H, in steps of the optimizer; 15 to 250 in the paper.
        outer_lr: :math:`\eta` above 0.
        error_decay: :math:`\beta` in [0, 1].

    Raises:
        ArgumentError: A number out of range.

    References:
        Sarfi, Thérien, Lidin, Belilovsky, "Communication efficient LLM pre-training with
        SparseLoCo", 2025.
    """

    name = "sparse_loco"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = complete
    needs = TopologyRequirements(uniform=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    default_compression = "top_k_int2"
    averages_first_step = False
    joined_ranks = JoinedRanks.FOLLOW
    parameter_state = (_OUTER,)
    zero_state = (_ERROR,)
    state_copies = 2

    def __init__(
        self,
        *,
        communication_interval: int = 30,
        outer_lr: float = 1.0,
        error_decay: float = 0.95,
    ) -> None:
        self.communication_interval = checked_interval(communication_interval)
        self.outer_lr = checked_positive("argument outer_lr", outer_lr)
        self.error_decay = checked_share("argument error_decay", error_decay, closed=True)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        error = bucket.state[_ERROR].mul_(self.error_decay)
        error.add_(bucket.state[_OUTER]).sub_(bucket.flat)
        return to_tiles(bucket, error.to(bucket.flat.dtype))

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        mixed, own = received.mixed, zeros_like(bucket.flat)
        received.add_own_to(own)
        outer = bucket.state[_OUTER].sub_(from_tiles(bucket, mixed), alpha=self.outer_lr)
        bucket.state[_ERROR].sub_(from_tiles(bucket, own))
        bucket.flat.copy_(outer)
