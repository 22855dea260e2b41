"""``gradient_allreduce``: averages gradients over all ranks (data-parallel SGD, the baseline)."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import (
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)


class GradientAllreduce(Algorithm):
    r"""Data-parallel SGD that averages gradients over all ranks by allreduce, as DDP does.

    .. math:: x^{+} = x - U\Big(\frac{1}{n} \sum_i g_i(x)\Big)

    All ranks start from the same parameters and keep them equal. With a compressor Q the average is
    :math:`Q_2(\frac1n \sum_i Q_1(g_i))`, and all ranks decode the same bytes.

    Args:
        hierarchical: Whether gradients are first summed inside each machine, so that only one rank
            per machine uses the network, with compression.
        average: Whether to divide the sum of the gradients by the number of ranks.

    References:
        Sergeev, Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
        Li et al., "PyTorch Distributed: experiences on accelerating data parallel training",
        VLDB 2020.
    """

    name = "gradient_allreduce"
    what = AveragedQuantity.GRADIENT
    when = CommunicationTiming.GRADIENT_READY
    how = (CommunicationPattern.GLOBAL,)
    exact = True
    compression = CompressionUse.AVERAGES

    def __init__(self, *, hierarchical: bool = False, average: bool = True) -> None:
        self.default_communication = "hierarchical_allreduce" if hierarchical else "allreduce"
        self.average = average
