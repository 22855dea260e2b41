"""``local_sgd``: averages models over all ranks after a number of local steps."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.wrapper_setup import checked_interval


class LocalSGD(Algorithm):
    r"""Local SGD: ranks make local steps, and average their models every H steps.

    .. math:: x_i \leftarrow \frac1n \sum_j x_j \quad\text{after steps } H, 2H, 3H, \dots

    The optimizer's state stays local. If data differ, models drift apart between averages, which
    causes a bias of the order of :math:`\gamma H`.

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
