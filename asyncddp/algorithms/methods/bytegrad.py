"""``bytegrad``: averages gradients over all ranks, quantised to 8 bits for transfer."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import (
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)


class ByteGrad(Algorithm):
    r"""Data-parallel SGD with gradients quantised to 8 bits for transfer, without error feedback.

    .. math:: x^{+} = x - U(\hat g), \qquad
              \hat g_c = Q\Big(\frac{1}{n} \sum_i Q(g_{i,c})\Big), \qquad c = 1, \dots, n

    Each bucket is divided into n parts; all ranks quantise each part between its minimum and
    maximum. Rank c averages part c of all ranks, and sends the quantised average to all, so that
    all ranks decode the same bytes and keep equal parameters. The error of an element is at most
    :math:`\frac1n \sum_i r_{i,c} / 510 + r_c / 510`, with r the ranges of the parts; the traffic
    is a quarter of that of float32. It is ``gradient_allreduce`` with another compressor by
    default.

    Args:
        hierarchical: Whether gradients are first summed inside each machine without quantisation,
            and quantised only for transfer between machines.
        average: Whether to divide the sum of the gradients by the number of ranks.

    References:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021.
    """

    name = "bytegrad"
    what = AveragedQuantity.GRADIENT
    when = CommunicationTiming.GRADIENT_READY
    how = (CommunicationPattern.GLOBAL,)
    compression = CompressionUse.AVERAGES
    default_compression = "minmax_uint8"

    def __init__(self, *, hierarchical: bool = False, average: bool = True) -> None:
        self.default_communication = "hierarchical_allreduce" if hierarchical else "allreduce"
        self.average = average
