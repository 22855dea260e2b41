"""``local_sgd``: averages models over all ranks after so many local steps."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.wrapper_setup import checked_interval


class LocalSGD(Algorithm):
    r"""Local SGD: each rank steps by itself, and every H steps all average their models.

    .. math:: x_i \leftarrow \frac1n \sum_j x_j \quad\text{after steps } H, 2H, 3H, \dots

    The optimizer's state stays with each rank. Where data differ, models drift apart in between,
    which leaves a bias of the order of :math:`\gamma H`.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.

    Raises:
        ArgumentError: Less than 1.

    References:
        Stich, "Local SGD converges fast and communicates little", ICLR 2019. McMahan et al.,
        "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
    """

    name = "local_sgd"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False

    def __init__(self, *, communication_interval: int = 8) -> None:
        self.communication_interval = checked_interval(communication_interval)
