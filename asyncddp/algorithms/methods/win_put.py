"""``win_put``: asynchronous averaging by one-sided puts into the neighbours' windows."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class WinPut(Algorithm):
    r"""Asynchronous decentralised SGD by one-sided puts: ranks never wait for slow neighbours.

    .. math:: x_i^{+} = w_{ii} x_i + \sum_j w_{ij} b_j - U\big(g_i(x_i)\big)

    with :math:`b_j` the last parameters that neighbour j has put, and U the optimizer's update.
    Parameters are put when the forward pass starts, and mixed just before the optimizer's step; the
    own tensor replaces parameters that have not arrived yet. With bounded delays it converges to a
    neighbourhood of the optimum like ``adapt_with_combine``, to which it is equal if all ranks are
    in step. Only then is the mean over ranks kept: with delays it drifts by the change of the
    delayed parameters. Ranks of different speed still have equal weight, since a slow rank mixes as
    seldom as it steps. The weight of a neighbour that has left is added to the own weight.

    References:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021. Tsitsiklis, Bertsekas, Athans, "Distributed asynchronous deterministic and
        stochastic gradient optimization algorithms", IEEE TAC 31(9), 1986.
    """

    name = "win_put"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.PUT,)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
