"""``win_put``: write parameters into the neighbours' windows, average with those received."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class WinPut(Algorithm):
    r"""Asynchronous decentralised SGD by one-sided puts: no rank waits for a slow neighbour.

    .. math:: x_i^{+} = w_{ii} x_i + \sum_j w_{ij} b_j - U\big(g_i(x_i)\big)

    with :math:`b_j` what neighbour j has put last, its parameters of some step of its own, and U
    the optimizer's update. Parameters are put as the forward pass starts and mixed just before the
    optimizer's step, where the own tensor stands in for what has not come yet. With delays of a
    bounded number of steps it converges to a neighbourhood of the optimum as ``adapt_with_combine``
    does, which it is where all ranks meet in each round. The mean over ranks is kept in such rounds
    alone: with delays it drifts by what the delayed parameters differ. Ranks of different speed
    count alike all the same, since a slow one mixes as seldom as it steps. The weight of a
    neighbour that has left is the own tensor's.

    References:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021. Tsitsiklis, Bertsekas, Athans, "Distributed asynchronous deterministic and
        stochastic gradient optimization algorithms", IEEE TAC 31(9), 1986.
    """

    name = "win_put"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.PUT,)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
